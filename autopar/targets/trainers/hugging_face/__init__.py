"""What the trainers of the Hugging Face stack have in common: strict sections, files beside a config, the model."""
