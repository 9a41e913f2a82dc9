"""The scripts: where they come from, how they are run, what is forced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts import data

NANOGPT = "karpathy/nanoGPT@3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
MINGPT = "karpathy/minGPT@37baab71b9abea1b76ab957409a1cc2fbfba8a26"
EXAMPLES = "pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8"
SHAPE_HAPPENS = "UKPLab/arxiv2025-shape-happens@56c3ba9b84917838570a4def2704afde1cd2349a"  # with a run_clm.py
PEFT = "huggingface/peft@5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"
MAKEMORE = "karpathy/makemore@988aa59e4d8fefa526d06f3b453ad116258398d4"
X_TRANSFORMERS = "lucidrains/x-transformers@9252ed7838021ee61e6c5be0930b3a9a88efdf06"
CIFAR = "kuangliu/pytorch-cifar@49b7aa97b0c12fe0d4054e670403a16b6b834ddd"
SAM = "davda54/sam@3c3afdbd71cff2462ec91c734b3d1170bd0f3707"
VIT_PYTORCH = "lucidrains/vit-pytorch@69d24fe9e3024c0d4b02761123b8583a24ebed1e"
LLAMA2C = "karpathy/llama2.c@350e04fe35433e6d2941dce5a1f53308f87058eb"
NLP_TUTORIAL = "graykode/nlp-tutorial@d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
LECTURE = "karpathy/ng-video-lecture@52201428ed7b46804849dea0b3ccf0de9df1a5c3"
PYTORCH_GAN = "eriklindernoren/PyTorch-GAN@36d3c77e5ff20ebe0aeefd322326a134a279b93e"
CLEANRL = "vwxyzjn/cleanrl@fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
BUILD_NANOGPT = "karpathy/build-nanogpt@6104ab1b53920f6e2159749676073ff7d815c1fa"
OLD_EXAMPLES = "pytorch/examples@5921fc191b83df2451c342b8bb30b5e3d8891ff8"

SMALL_GPT2 = "vocab_size=64,n_embd=32,n_layer=2,n_head=4"


@dataclass(frozen=True)
class Script:
    """One script as it is trained here.

    Attributes:
        source: ``owner/repository@commit``.
        path: of the script in its repository; it runs in that file's folder.
        args: what it is called with, each run of it.
        runs: what is called with beside that: one run for each. The key says whether the script draws random numbers
            within ``forward`` (``random``): the program draws others than eager mode, so two ranks are compared with
            the changed script on one; else (``plain``) with the script as it is.
        cuts: options that are forced, one after the other.
        data: makes what it reads, in the folder where it runs.
        diff: of ``diffs/``, by default its repository's or folder's name.
        fails_at_end: the script as it is does not come to its end with this version of torch; what it gave is compared.
        today: of ``today/``: what is changed first, in either run, since the script is older than its libraries.
        reads: ``item``, ``any``, ``backward`` or ``log``, see ``started.py``.
        stubs: the folder of what stands for packages.
        wide: the script computes in float64, and numbers are the same to 1e-10: where rounding of float32 grows beyond
            1e-5 by itself, in losses that are small differences or at high rates.
        weights: a safetensors file that the script leaves; norms of its tensors are compared, too.
    """

    source: str
    path: str
    args: tuple[str, ...] = ()
    runs: tuple[tuple[str, tuple[str, ...]], ...] = (("plain", ()),)
    cuts: tuple[str, ...] = ("b", "-")
    data: Callable[[Path], None] = data.nothing
    diff: str = ""
    fails_at_end: bool = False
    today: str = ""
    reads: str = "item"
    stubs: str = "stubs"
    wide: bool = False
    weights: str = ""


# examples' regression is no script to compare: in float64, too, its own weights moved by 1e-15 give other losses in the
# second digit after a thousand of its steps, in eager mode
SCRIPTS: dict[str, Script] = {
    "nanoGPT": Script(
        NANOGPT, "train.py",
        ("--dataset=noise", "--device=cpu", "--compile=False", "--dtype=float32", "--n_layer=2", "--n_head=2",
         "--n_embd=32", "--block_size=16", "--batch_size=8", "--max_iters=12", "--eval_interval=4", "--eval_iters=2",
         "--gradient_accumulation_steps=2", "--warmup_iters=3", "--lr_decay_iters=12", "--learning_rate=1e-2"),
        runs=(("plain", ()), ("random", ("--dropout=0.2",))), cuts=("b", "n", "-"), data=data.tokens,
    ),
    "build_nanogpt": Script(  # it generates, and scores endings of other lengths, while it trains
        BUILD_NANOGPT, "train_gpt2.py", cuts=("b", "n", "-"), data=data.shards_of_numpy, today="build_nanogpt",
    ),
    "llama2.c": Script(  # its loss is an attribute of the model
        LLAMA2C, "train.py",
        ("--device=cpu", "--compile=False", "--dtype=float32", "--vocab_source=custom", "--vocab_size=64", "--dim=32",
         "--n_layers=2", "--n_heads=4", "--n_kv_heads=2", "--multiple_of=8", "--max_seq_len=16", "--batch_size=4",
         "--max_iters=12", "--eval_interval=4", "--eval_iters=2", "--gradient_accumulation_steps=2",
         "--warmup_iters=3", "--learning_rate=1e-2"),
        runs=(("plain", ()), ("random", ("--dropout=0.2",))), cuts=("b", "n", "-"), data=data.shards, diff="llama2c",
    ),
    "minGPT": Script(
        MINGPT, "projects/chargpt/chargpt.py",
        ("--model.model_type=gpt-nano", "--trainer.max_iters=80", "--trainer.batch_size=6", "--trainer.num_workers=0",
         "--trainer.device=cpu", "--data.block_size=16"),
        runs=(("plain", ("--model.embd_pdrop=0", "--model.resid_pdrop=0", "--model.attn_pdrop=0")), ("random", ())),
        data=data.text,
    ),
    "mnist": Script(
        EXAMPLES, "mnist/main.py",
        ("--no-accel", "--batch-size=32", "--test-batch-size=40", "--epochs=2", "--log-interval=1", "--save-model"),
        runs=(("random", ()),),
    ),
    "vae": Script(
        EXAMPLES, "vae/main.py", ("--no-accel", "--batch-size=32", "--epochs=2"), runs=(("random", ()),),
        cuts=("b", "-"), data=data.results,
    ),
    "dcgan": Script(  # seeds 1 to 3 hold; 4 is 9e-4 in float32 and 7e-16 in float64
        EXAMPLES, "dcgan/main.py",
        ("--dataset=fake", "--batchSize=8", "--workers=0", "--ngf=8", "--ndf=8", "--nz=16", "--niter=2",
         "--manualSeed=1"),
    ),
    "siamese_network": Script(  # in float32 a ReLU that flips by rounding tells at its own rate of 1
        EXAMPLES, "siamese_network/main.py",
        ("--no-accel", "--batch-size=32", "--test-batch-size=40", "--epochs=1", "--log-interval=1", "--save-model",
         "--seed=0", "--lr=0.02"),
    ),
    "super_resolution": Script(
        EXAMPLES, "super_resolution/main.py",
        ("--upscale_factor=4", "--batchSize=4", "--testBatchSize=3", "--nEpochs=2", "--threads=0", "--lr=0.001"),
        data=data.pictures,
    ),
    "word_language_model Transformer": Script(
        EXAMPLES, "word_language_model/main.py",
        ("--model=Transformer", "--data=data/words", "--emsize=16", "--nhid=16", "--nlayers=2", "--nhead=2", "--lr=1",
         "--epochs=2", "--batch_size=6", "--bptt=7", "--log-interval=5", "--dropout=0.2"),
        runs=(("random", ()),), data=data.words, diff="word_language_model",
    ),
    "word_language_model LSTM": Script(
        EXAMPLES, "word_language_model/main.py",
        ("--model=LSTM", "--data=data/words", "--emsize=16", "--nhid=16", "--nlayers=2", "--lr=1", "--epochs=2",
         "--batch_size=6", "--bptt=7", "--log-interval=5"),
        runs=(("plain", ("--dropout=0",)), ("random", ("--dropout=0.2",))), cuts=("n", "-"),
        data=data.words, diff="word_language_model",
    ),
    "vision_transformer": Script(
        OLD_EXAMPLES, "vision_transformer/main.py",
        ("--no-cuda", "--patch-size=8", "--latent-size=16", "--num-heads=2", "--num-encoders=2", "--img-size=32",
         "--epochs=2", "--lr=0.01"),
        runs=(("plain", ("--dropout=0",)),),
    ),
    "gcn": Script(
        EXAMPLES, "gcn/main.py", ("--no-accel", "--epochs=6", "--val-every=1"),
        runs=(("plain", ("--dropout-p=0",)), ("random", ())), cuts=("n", "-"),
    ),
    **{
        f"makemore {kind}": Script(
            MAKEMORE, "makemore.py",
            (f"--type={kind}", "--max-steps=501", "--batch-size=8", "--n-embd=16", "--n-embd2=16", "--n-layer=2",
             "--num-workers=0"),
            data=data.names, diff="makemore",
        )
        for kind in ("transformer", "mlp", "gru")
    },
    "actor_critic": Script(
        EXAMPLES, "reinforcement_learning/actor_critic.py", cuts=("n", "-"),
    ),
    "reinforce": Script(
        EXAMPLES, "reinforcement_learning/reinforce.py", runs=(("random", ()),), cuts=("n", "-"), reads="any",
    ),
    "fast_neural_style": Script(
        EXAMPLES, "fast_neural_style/neural_style/neural_style.py",
        ("train", "--epochs=2", "--batch-size=4", "--dataset=images", "--save-model-dir=saved", "--image-size=32",
         "--style-image=mosaic.jpg", "--style-size=32", "--checkpoint-model-dir=between", "--checkpoint-interval=2",
         "--log-interval=1"),
        diff="fast_neural_style", wide=True,
    ),
    "mnist_rnn": Script(
        EXAMPLES, "mnist_rnn/main.py",
        ("--batch-size=32", "--test-batch-size=40", "--epochs=2", "--log-interval=1", "--save-model"),
        runs=(("random", ()),),
    ),
    "time_sequence_prediction": Script(
        EXAMPLES, "time_sequence_prediction/train.py", ("--steps=2",), data=data.waves,
        today="time_sequence_prediction",
    ),
    "x_transformers copy": Script(
        X_TRANSFORMERS, "train_copy.py", cuts=("b", "n", "-"), diff="x_transformers_copy", today="x_transformers_copy",
    ),
    "imagenet": Script(
        EXAMPLES, "imagenet/main.py",
        ("--arch=resnet18", "--epochs=2", "--batch-size=4", "--workers=2", "--no-accel", "--lr=0.01", "--print-freq=1",
         "--seed=3", "data"),
    ),
    "gat": Script(
        EXAMPLES, "gat/main.py", ("--no-accel", "--epochs=6", "--val-every=1", "--hidden-dim=16"),
        runs=(("plain", ("--dropout-p=0",)), ("random", ())), cuts=("-",),
    ),
    "pytorch_cifar": Script(CIFAR, "main.py", diff="pytorch_cifar", today="pytorch_cifar", wide=True),
    "sam": Script(
        SAM, "example/train.py",
        ("--batch_size=8", "--epochs=2", "--threads=0", "--depth=10", "--width_factor=1", "--learning_rate=0.01"),
    ),
    "vit_decorr": Script(
        VIT_PYTORCH, "train_vit_decorr.py", cuts=("b", "n", "-"), diff="vit_decorr", today="vit_decorr",
    ),
    **{
        f"nlp_{name}": Script(  # BERT's forward makes linear layers, with random weights
            NLP_TUTORIAL, path, runs=(("random" if name == "bert" else "plain", ()),), cuts=cuts,
            diff=f"nlp_{name}", today=f"nlp_{name}", reads="backward",
        )
        for name, cuts, path in (
            ("transformer", ("n", "-"), "5-1.Transformer/Transformer.py"),  # a batch of one row
            ("bert", ("b", "n", "-"), "5-2.BERT/BERT.py"),
            ("textcnn", ("b", "n", "-"), "2-1.TextCNN/TextCNN.py"),
            ("bilstm", ("b", "n", "-"), "4-3.Bi-LSTM(Attention)/Bi-LSTM(Attention).py"),
            ("seq2seq", ("n", "-"), "4-2.Seq2Seq(Attention)/Seq2Seq(Attention).py"),
        )
    },
    "ng_gpt": Script(
        LECTURE, "gpt.py", runs=(("random", ()),), cuts=("b", "n", "-"), diff="ng_gpt", today="ng_gpt",
    ),
    "wgan": Script(  # weights of the critic are clamped
        PYTORCH_GAN, "implementations/wgan/wgan.py", ("--n_epochs=3", "--batch_size=32", "--latent_dim=16"),
        cuts=("b", "n", "-"), diff="wgan", reads="backward",
    ),
    "cleanrl_dqn": Script(  # a target network follows
        CLEANRL, "cleanrl/dqn.py",
        ("--total-timesteps=400", "--learning-starts=100", "--batch-size=32", "--target-network-frequency=50",
         "--exploration-fraction=0.2"),
        cuts=("b", "n", "-"), diff="cleanrl_dqn", reads="backward", stubs="stubs_of_metrics",
    ),
    "cleanrl_ppo": Script(  # forward is a method's name; actions are drawn by the method, from gathered parameters
        CLEANRL, "cleanrl/ppo.py", ("--total-timesteps=512", "--num-steps=64", "--num-envs=2"),
        cuts=("b", "n", "-"), reads="backward", stubs="stubs_of_metrics",
    ),
    "cleanrl_td3": Script(  # plain targets follow three parallel modules; noise is as large as a buffer says
        CLEANRL, "cleanrl/td3_continuous_action.py",
        ("--env-id=Pendulum-v1", "--total-timesteps=130", "--learning-starts=100", "--batch-size=32"),
        cuts=("b", "n", "-"), reads="backward", stubs="stubs_of_metrics",
    ),
    "run_clm": Script(
        SHAPE_HAPPENS, "run_clm.py",
        ("--model_type=gpt2", "--tokenizer_name=tokenizer", "--train_file=train.txt", "--validation_file=valid.txt",
         "--do_train", "--do_eval", "--eval_strategy=steps", "--eval_steps=5", "--save_steps=5", "--logging_steps=1",
         "--block_size=16", "--per_device_train_batch_size=4", "--per_device_eval_batch_size=3",
         "--num_train_epochs=2", "--gradient_accumulation_steps=2", "--learning_rate=1e-3", "--output_dir=out",
         "--use_cpu", "--report_to=none", "--disable_tqdm=True"),
        runs=(
            ("plain", (f"--config_overrides={SMALL_GPT2},attn_pdrop=0,embd_pdrop=0,resid_pdrop=0",)),
            ("random", (f"--config_overrides={SMALL_GPT2}",)),
        ),
        cuts=("b", "n", "-"), data=data.language_model, today="run_clm", reads="log",
        stubs="stubs_of_metrics", weights="out/model.safetensors",
    ),
    "peft olora": Script(
        PEFT, "examples/olora_finetuning/olora_finetuning.py",
        ("--base_model=base", "--data_path=rows", "--batch_size=8", "--num_epochs=10", "--learning_rate=1e-2",
         "--val_set_size=16", "--eval_step=20", "--save_step=40", "--device_map=cpu", "--lora_r=4", "--dtype=float32",
         "--seed=0", "--cutoff_len=48"),
        runs=(("plain", ("--lora_dropout=0",)), ("random", ())),
        cuts=("b", "n", "-"), data=data.instructions, diff="olora", reads="log", stubs="stubs_of_metrics",
        weights="olora/adapter_model.safetensors",
    ),
}  # fmt: skip
