"""What the trainers of the Hugging Face stack have in common: strict sections, files beside a config, the model.

=================== ===================================================================================================
:mod:`.known`       fields of accelerate 1.15.0 and of the TrainingArguments of transformers 5.23.0, from their own
                    code
:mod:`.model_files` what exported folders share: the user's model, ``run.json``, Trainer arguments, train.py
:mod:`.run_facts`   what a run has beside a trainer's own config
:mod:`.section`     A strict reader of one table of a config
=================== ===================================================================================================
"""
