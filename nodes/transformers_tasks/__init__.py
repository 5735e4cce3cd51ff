"""Tasks of the transformers node, by modality."""
