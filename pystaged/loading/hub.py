"""Models of a Hugging Face hub: chosen, downloaded, and converted where they are checkpoints."""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pystaged.loading import cache
from pystaged.loading.families import ARCHITECTURES, DRAFT_ARCHITECTURES, MODEL_TYPES, SPECULATORS, not_converted
from pystaged.loading.metadata import COMMIT, FILE_TYPES, About, read_metadata
from pystaged.loading.progress import Progress
from pystaged.loading.quantize import DEFAULT_TYPE, check_type, quantize_checkpoint
from pystaged.options.aliases import hub_id, usual_names
from pystaged.platform.files import check_room, update
from pystaged.platform.seen import PART

HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?::(?P<wanted>.+))?")


def pull(name: str, quantization: str = "", progress: Progress = lambda *_: None) -> Path:
    """Get a model from the hub: a GGUF file into Hugging Face's cache, a checkpoint converted and quantized into ours.
    Returns its file.

    Args:
        name: "owner/name", optionally with ":FILE.gguf" or ":TYPE"; or the hub's address of it.
        quantization: a type, in place of the name's.
        progress: called with bytes, or tensors while quantizing.

    Raises:
        FileNotFoundError: no such repository, or no file in it that is or becomes a model.
        PermissionError: a gated or private repository.
        ConnectionError: no network, or a hub that fails.
        ValueError: a malformed name, type or checkpoint, or another architecture.
        OSError: a wrong checksum, a full disk.
    """
    from pystaged.loading.convert import CONFIG, INDEX, PICKLED, WEIGHTS  # noqa: PLC0415  imports gguf and safetensors

    match = HUB_ID.fullmatch(hub_id(name))
    if not match:
        raise ValueError(
            f"{name!r} is no hub id; it should look like owner/name, owner/name:TYPE or owner/name:FILE.gguf, or be "
            f"{usual_names(name)}"
        )
    wanted = check_type(quantization) if quantization else match["wanted"] or ""
    repository = _Repository(match["repository"], progress)
    models = [file for file in repository.sizes if file.endswith(".gguf") and not PART.search(file)]
    known = (*ARCHITECTURES, *DRAFT_ARCHITECTURES)
    if chosen := cache.choose(models, wanted):
        if repository.architecture not in (None, *known):
            raise ValueError(
                f"{repository.name}: the architecture {repository.architecture!r} is not supported, only "
                f"{', '.join(known)}"
            )
        return repository.fetch(chosen)
    if CONFIG in repository.sizes and {WEIGHTS, INDEX, PICKLED} & repository.sizes.keys():
        kind = wanted.lower() or DEFAULT_TYPE
        if kind not in FILE_TYPES:
            raise FileNotFoundError(
                f"{repository.name} has no {wanted}; its checkpoint can be converted to: {', '.join(FILE_TYPES)}"
            )
        return _convert(repository, kind)
    names = {PART.sub(".gguf", file) for file in repository.sizes if PART.search(file)}
    if (wanted or not models) and (whole := cache.choose(sorted(names), wanted)):
        raise FileNotFoundError(
            f"{repository.name} has {whole} in several files, which are not downloaded here; run: hf download "
            f"{repository.name} --include '{whole.removesuffix('.gguf')}-*', and name the path of the first"
        )
    if models:
        raise FileNotFoundError(
            f"{repository.name} has {'no single file that fits ' + wanted if wanted else 'several models'}; "
            f"name one: {', '.join(f'{repository.name}:{file}' for file in models[:20])}"
        )
    raise FileNotFoundError(
        f"{repository.name} has no suitable file: neither a whole GGUF file nor {CONFIG} with {WEIGHTS} or {PICKLED}"
    )


def _convert(repository: _Repository, kind: str) -> Path:
    """A checkpoint of the hub as a model in our folder."""
    from pystaged.loading import convert, feature_drafts, vocabulary  # noqa: PLC0415  import gguf and safetensors

    if repository.model_type not in (None, *MODEL_TYPES, SPECULATORS):
        raise ValueError(f"{repository.name}: {not_converted(repository.model_type)}")
    name, stem = repository.name, repository.name.rpartition("/")[2]
    out = cache.folder(name) / f"{stem}.{kind.upper()}.gguf"
    if read_metadata(out).get(COMMIT) == repository.commit:
        return out
    config = repository.fetch(convert.CONFIG)
    is_draft = convert.check(vocabulary.read_json(config), Path(name, convert.CONFIG), kind)
    if is_draft:
        feature_drafts.check_files(name, repository.sizes)
    else:
        vocabulary.check_tokenizer(name, repository.sizes)
    weights = [convert.WEIGHTS if convert.WEIGHTS in repository.sizes else convert.PICKLED]
    if convert.INDEX in repository.sizes:
        weights = convert.shard_names(repository.fetch(convert.INDEX))
    elif weights == [convert.PICKLED]:
        convert.torch_for(Path(name, convert.PICKLED))
    settings = [] if is_draft else list(filter(vocabulary.SETTINGS_FILES.fullmatch, repository.sizes))
    for file in (*settings, *weights):
        repository.fetch(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_symlink():  # of older versions, to a file of that name that the repository had before
        out.unlink()
    about = About(stem, repository.license, f"{_endpoint()}/{name}", repository.commit)
    quantize_checkpoint(config.parent, out, kind, about=about, progress=repository.progress)
    return out


class _Repository:
    """A model repository on the hub, at its newest commit; or its copy in the cache if the hub cannot be reached."""

    def __init__(self, name: str, progress: Progress) -> None:
        from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415

        self.name, self.progress = name, progress
        self.license, self.architecture, self.model_type = "", None, None
        try:
            with _errors(name):
                info = HfApi(endpoint=_endpoint()).model_info(name, files_metadata=True)
        except ConnectionError as error:
            try:
                folder = Path(snapshot_download(name, local_files_only=True))
            except (OSError, ValueError):
                raise error from None
            self.commit = folder.name
            self.sizes = {file.relative_to(folder).as_posix(): 0 for file in folder.rglob("*") if file.is_file()}
            return
        tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
        license_name = info.card_data.license if info.card_data else None
        self.license = license_name if isinstance(license_name, str) else next(iter(tags), "")
        self.architecture = (info.gguf or {}).get("architecture")  # of GGUF files
        self.model_type = (info.config or {}).get("model_type")  # of a checkpoint
        self.commit = str(info.sha)
        self.sizes = {file.rfilename: (file.lfs or file).size or 0 for file in info.siblings or ()}

    def fetch(self, name: str) -> Path:
        """A file, in Hugging Face's cache; downloaded where it is not there yet."""
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache  # noqa: PLC0415

        if name not in self.sizes:
            raise FileNotFoundError(f"{self.name} has no {name}")
        cached = try_to_load_from_cache(self.name, name, revision=self.commit)
        if isinstance(cached, str):
            return Path(cached)
        size = self.sizes[name]
        check_room(Path(constants.HF_HUB_CACHE), size)
        bar = _bar(lambda done: self.progress(f"downloading {name}", done, size))
        for wait in (0.5, 1, 2, 0):
            try:
                with _errors(self.name):
                    # By branch, not by commit, so that others find it by name without a network.
                    path = Path(hf_hub_download(self.name, name, endpoint=_endpoint(), tqdm_class=bar))
                break
            except ConnectionError:
                if not wait:
                    raise
                time.sleep(wait)
        if not path.as_posix().endswith(f"/{self.commit}/{name}"):
            raise OSError(f"{self.name} was changed while it was downloaded; try again")
        blob = path.resolve()
        if len(blob.name) == 64:  # named by its SHA-256, which huggingface_hub does not check
            digest = hashlib.sha256()
            with blob.open("rb") as file:
                update(digest, file)
            if digest.hexdigest() != blob.name:
                blob.unlink()
                path.unlink(missing_ok=True)
                raise OSError(f"{self.name}: what was downloaded is not {name}: its checksum differs; try again")
        return path


def _endpoint() -> str:
    """The hub; huggingface_hub reads the variable only when it is imported."""
    from huggingface_hub import constants  # noqa: PLC0415

    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn the hub's errors into ones that say what to do."""
    from huggingface_hub import errors  # noqa: PLC0415

    transport: Any = errors.HfHubHTTPError.__bases__[0]  # of whichever HTTP library this version uses
    hub, login = _endpoint(), "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError:
        raise PermissionError(f"{name} is gated: accept its conditions at {hub}/{name}, then {login}") from None
    except errors.OfflineModeIsEnabled:
        raise ConnectionError(f"{name} is not in the cache, and HF_HUB_OFFLINE forbids asking {hub}") from None
    except errors.HfHubHTTPError as error:
        status, said = error.response.status_code, error.response.headers.get("X-Error-Message", "")
        # Without a valid token the hub answers 401 for repositories that do not exist, too.
        if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and "Invalid credentials" not in said):
            raise FileNotFoundError(
                f"there is no model {name} at {hub}, or it is private: check the name, or {login}"
            ) from None
        if status in (401, 403):
            raise PermissionError(f"{hub} refuses access to {name} ({status}): {login}") from None
        raise ConnectionError(f"{hub} answers {status} for {name}; try again later") from None
    except (errors.LocalEntryNotFoundError, transport) as error:
        raise ConnectionError(
            f"no connection to {hub} for {name}: {error.__cause__ or error}; check the network, then run the same again"
        ) from None


def _bar(show: Callable[[int], None]) -> type[Any]:
    """A class of progress bars for huggingface_hub that draw nothing and call `show` with the bytes so far."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415

    most = 0

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": False, "file": io.StringIO()})

        def update(self, n: float = 1) -> None:
            nonlocal most
            super().update(n)
            most = max(most, int(self.n))  # Xet has two bars, one for what is received and one for what is written
            show(most)

        def display(self, *_: object, **__: object) -> None:
            pass

    return Bar
