"""Fetches a model by its hub name ("organisation/model") through huggingface_hub.

Only configuration, tokenizer and safetensors files are asked for: nothing that would be unpickled.
"""

from pathlib import Path

from octavo.sources.model_source import SourceError

_WANTED = ("*.json", "*.jinja", "*.safetensors")
# The same weights again, in their authors' own layout.
_UNWANTED = ("consolidated*", "original/*")


def fetch_from_hub(name: str) -> Path:
    """The local snapshot of a hub model, downloaded, or the one in the hub's own cache when offline.

    Raises `SourceError` naming what can be served without a hub.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise SourceError(
            f"{name!r} is a hub name and huggingface_hub is not installed; "
            "pip install 'octavo[worker]' (or octavo[router])"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)))
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"the hub has no model {name!r} that this machine may read; check the name, or log in with "
            "`hf auth login` if it is gated"
        ) from error
    except LocalEntryNotFoundError as error:
        raise SourceError(f"{_unreachable(name)} ({_first_line(error.__cause__ or error)})") from error
    except Exception as error:  # the hub client raises its transport's errors, whichever that is
        raise SourceError(f"{_unreachable(name)} ({type(error).__name__}: {_first_line(error)})") from error


def _unreachable(name: str) -> str:
    from octavo.sources.default_model import DEFAULT_MODEL

    return (
        f"{name!r} is neither a local path nor in the hub's cache, and the hub did not answer; without a "
        f"hub, serve the path of a Hugging Face directory or of a .gguf file, or {DEFAULT_MODEL!r}"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
