"""`fmlab serve FOLDER`: serve a trained model on this machine, until interrupted."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from fmlab.data import ByteBPE
from fmlab.models import GPT, Llama
from fmlab.models.base import Model
from fmlab.models.hf import find_folder, model_type
from fmlab.train.serve.server import Server

MODELS: dict[str, type[Model]] = {"gpt2": GPT, "llama": Llama, "qwen2": Llama}


@dataclass
class Serve:
    """Serve a language model with an OpenAI-style completions route, for clients on this machine."""

    model: tyro.conf.Positional[str]
    """Folder or repository in Hugging Face's format with its tokenizer, as a training run writes it."""
    port: int = 8000
    """Port to listen on; 0 for any free one."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is for this machine alone, and there is no password on any other."""
    pages: int = 512
    """Pages of the cache of keys and values; see page_size."""
    page_size: int = 16
    """Tokens a page."""
    max_batch: int = 16
    """Texts that run at once."""
    max_waiting: int = 64
    """Requests that may wait; more are turned away."""

    def run(self) -> None:
        """Serve until interrupted. Raises ValueError or OSError before anything is served."""
        folder = find_folder(self.model)
        if not (folder / "config.json").exists() and (folder / "model" / "config.json").exists():
            raise ValueError(f"{folder} is the folder of a training run; its model is in {folder / 'model'}")
        kind = model_type(folder)
        if kind not in MODELS:
            raise ValueError(f"{folder} holds a {kind!r} model; what can be served: {', '.join(MODELS)}")
        tokenizer = ByteBPE.load(folder)
        with Server(
            MODELS[kind].from_pretrained(folder),
            tokenizer,
            Path(folder).name,
            host=self.host,
            port=self.port,
            max_waiting=self.max_waiting,
            pages=self.pages,
            page_size=self.page_size,
            max_batch=self.max_batch,
        ) as server:
            example = f'curl {server.url}/v1/completions -d \'{{"prompt": "The", "max_tokens": 20}}\''
            print(f"serving {folder} at {server.url}; try: {example}", flush=True)
            while server.worker.failure is None:
                time.sleep(0.5)
            raise OSError(f"the model has failed: {server.worker.failure!r}")


def main(argv: list[str] | None = None) -> int:
    """Run `fmlab serve`. Raises ValueError, OSError or ImportError for what the user can put right."""
    tyro.cli(Serve, args=argv, prog="fmlab serve", description=Serve.__doc__).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
