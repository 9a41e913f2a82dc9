"""What the trainers of the Hugging Face stack have in common: strict sections, files beside a config, the model.

=================== ===================================================================================================
:mod:`.known`       fields of accelerate 1.15.0 and of the TrainingArguments of transformers 5.23.0, from their own
                    code
:mod:`.model_files` the user's model in an exported folder, what ``run.json`` says of it, and Trainer arguments
:mod:`.run_facts`   what a run has beside a trainer's own config
:mod:`.section`     A strict reader of one table of a config
=================== ===================================================================================================
"""
