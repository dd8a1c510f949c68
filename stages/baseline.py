"""mlx-lm's own server as a contestant of `make bench`: the same float32 weights, its code unmodified.

    python -m stages.baseline prepare DIR              SmolLM2 as a float32 Hugging Face folder
    python -m stages.baseline serve DIR --port N --blas ours|shipped [--threads N]

With `--blas ours` the BLAS that Headrace uses is made global before mlx is imported; `shipped` runs
the wheel as it is installed. Nothing else differs; both may be called by 128 clients at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.device import Device


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    if args.verb == "prepare":
        prepare(Path(args.folder), Device(threads=args.threads))
    else:
        serve(args.folder, args.port, Device(threads=args.threads, blas=BLAS[args.blas]))
    return 0


BLAS: dict[str, Any] = {"ours": "auto", "shipped": "none"}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.baseline")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("prepare", "serve"):
        one = verbs.add_parser(verb)
        one.add_argument("folder")
        one.add_argument("--threads", type=int, default=None)
    one.add_argument("--port", type=int, required=True)
    one.add_argument("--blas", choices=sorted(BLAS), required=True)
    return parser


def prepare(folder: Path, device: Device) -> None:
    """Write the folder unless it is there already; a broken-off attempt leaves none."""
    if folder.exists():
        return
    device.open()
    from stages.models.loading.gguf_archs import ARCHITECTURES
    from stages.models.loading.gguf_reader import read
    from stages.models.loading.gguf_tokens import gguf_tokens
    from stages.models.smollm2 import Smollm2

    model = Smollm2(device)  # type: ignore[arg-type]  # its literals are narrower
    file = read(model.locate())
    arch = ARCHITECTURES["llama"]
    config = arch.config(lambda key, default=None: file.metadata.get(f"llama.{key}", default))
    tokens, words = gguf_tokens(file.metadata, None, model.memory)
    tied = "output.weight" not in file.tensors
    facts = {"vocab_size": len(words.tokens), "tie_word_embeddings": tied, "torch_dtype": "float32"}
    ids = {"bos_token_id": words.id("bos"), "eos_token_id": words.id("eos")}
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    _write(partial / "config.json", config | facts | ids)
    _write(partial / "tokenizer_config.json", _tokenizer_config(words, tokens.template))
    tokens.save(partial / "tokenizer.json")
    _weights(partial / "model.safetensors", arch, config, file)
    partial.rename(folder)


def _tokenizer_config(words: Any, template: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words.text("bos"),
        "eos_token": words.text("eos"),
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }


def _weights(path: Path, arch: Any, config: dict[str, Any], file: Any) -> None:
    import mlx.core as mx

    from stages.models.loading.gguf_weights import float_weights, rename

    weights = rename(arch, config, float_weights(file))
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def serve(folder: str, port: int, device: Device) -> None:
    """mlx-lm's `main`, with its own defaults. The device is opened first: it loads the BLAS."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    device.open()
    from http.server import ThreadingHTTPServer

    from mlx_lm import server

    ThreadingHTTPServer.request_queue_size = (
        128  # with its 5, some of 32 who come at once are reset
    )
    sys.argv = ["mlx_lm.server", "--model", folder, "--port", str(port), "--log-level", "WARNING"]
    server.main()


if __name__ == "__main__":
    raise SystemExit(main())
