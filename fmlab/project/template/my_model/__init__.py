"""The model of this project."""
