"""``--pipeline-model-parallel-layout`` as numbers of layers.

The grammar is that of PipelineParallelLayerLayout.parse_str_to_list (megatron/core/transformer): ``E`` the embedding,
``t`` a layer, ``m`` one that predicts further tokens, ``L`` the loss, ``|`` between stages, ``(..)*n`` and ``x*n`` for
repetition, commas for the eye.
"""

from __future__ import annotations

import re

from autopar.targets.trainers.megatron.options import MegatronOptions

OPTION = "--pipeline-model-parallel-layout"
LONGEST = 100_000
"""Signs of a layout when repetitions are written out."""


def stages_of_text(options: MegatronOptions, text: str, pp: int) -> list[int]:
    """Return how many layers every stage has, in the order of the model.

    Raises:
        ConfigError: the text is none of a layout, or its stages do not divide over the groups.
    """
    plain = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda found: found[1] * min(int(found[2]), LONGEST), plain)
        if len(plain) > LONGEST:
            raise options.error(OPTION, f"has {len(plain):,} signs written out, at most {LONGEST:,} are read")
    wrong = sorted(set(plain) - set("Etm|L"))
    if wrong:
        raise options.error(OPTION, f"'{text}' has '{wrong[0]}'; it is made of E, t, m, L and |")
    stages = plain.split("|")
    if len(stages) % pp:
        raise options.error(OPTION, f"has {len(stages)} stages, which do not divide over pp={pp}; change one of them")
    if not plain.startswith("E") or not plain.endswith("L"):
        raise options.error(OPTION, f"'{text}' has to begin with E and end with L")
    return [stage.count("t") for stage in stages]
