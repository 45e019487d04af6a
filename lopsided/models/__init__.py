"""Models by name: the zoo, and Hugging Face architectures."""
