"""Checkers of the exercises, one module per notebook. A new module gets its line here."""

MODULES = {
    "0.1": "welcome",
    "0.2": "predict_measure",
    "1.1": "recurrence",
    "1.2": "attention",
    "1.3": "gpt",
    "1.4": "wirings",
    "1.5": "multimodal",
    "1.6": "diffusion",
    "1.7": "adapt",
    "1.8": "inference",
    "1.9": "chips",
    "1.10": "collectives",
    "1.11": "xla",
    "2.2": "data_parallel",
    "2.5": "tensor_parallel",
    "2.6": "pipeline",
    "2.7": "context",
    "3.2": "porting",
    "9.1": "example",
}
