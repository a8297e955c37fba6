"""Models of a Hugging Face hub: chosen, downloaded, verified, and converted where they are checkpoints."""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pystaged.aliases import hub_id
from pystaged.files import check_room, update
from pystaged.loading import cache
from pystaged.loading.families import (
    ARCHITECTURES,
    DRAFT_ARCHITECTURES,
    DRAFT_MODEL_TYPES,
    MODEL_TYPES,
    not_converted,
)
from pystaged.loading.file_types import FILE_TYPES
from pystaged.loading.metadata import About
from pystaged.loading.progress import Progress
from pystaged.loading.quantize import DEFAULT_TYPE, check_type, quantize_checkpoint

HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?::(?P<wanted>.+))?")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of git for small files, SHA-256 for large ones
_PART_OF_MODEL = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_ATTEMPTS = 4

T = TypeVar("T")


def pull(name: str, quantization: str = "", progress: Progress = lambda *_: None) -> Path:
    """Get a model from the hub into the cache: a GGUF file as it is, a checkpoint converted and quantized.

    huggingface_hub downloads into Hugging Face's own cache. HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and
    HF_HUB_OFFLINE are honoured.

    Args:
        name: "owner/name", optionally with ":FILE.gguf" or ":TYPE"; or the hub's address of it.
        quantization: a type, in place of the name's.
        progress: called with bytes, or tensors while quantizing.

    Returns:
        The file in the cache.

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
            f"{name!r} is no hub id; it should look like owner/name, owner/name:TYPE or owner/name:FILE.gguf"
        )
    repository_name, wanted = match["repository"], match["wanted"] or ""
    if quantization:
        wanted = check_type(quantization)
    repository = _Repository.open(repository_name, progress)
    models = [file for file in repository.files if file.endswith(".gguf") and not _PART_OF_MODEL.search(file)]
    chosen = cache.choose(models, wanted)
    if chosen:
        repository.check_family(checkpoint=False)
        path = cache.save_link(repository_name, chosen, repository.fetch(chosen))
        downloaded = chosen in repository.downloaded
        cache.save_source(path, repository.revision, repository.license, downloaded=downloaded)
        return path
    if CONFIG in repository.files and {WEIGHTS, INDEX, PICKLED} & repository.files.keys():
        kind = wanted.lower() or DEFAULT_TYPE
        if kind not in FILE_TYPES:
            raise FileNotFoundError(
                f"{repository_name} has no {wanted}; its checkpoint can be converted to: {', '.join(FILE_TYPES)}"
            )
        repository.check_family(checkpoint=True)
        return _convert(repository, kind)
    if models:
        raise FileNotFoundError(
            f"{repository_name} has {'no single file that fits ' + wanted if wanted else 'several models'}; "
            f"name one: {', '.join(f'{repository_name}:{file}' for file in models[:20])}"
        )
    raise FileNotFoundError(
        f"{repository_name} has no suitable file: neither a whole GGUF file nor {CONFIG} with {WEIGHTS} or {PICKLED}"
    )


def _convert(repository: _Repository, kind: str) -> Path:
    """A checkpoint of the hub as a model in the cache."""
    from pystaged.loading import feature_drafts  # noqa: PLC0415  imports gguf and safetensors, as the next does
    from pystaged.loading.config_reader import language_part  # noqa: PLC0415
    from pystaged.loading.convert import (  # noqa: PLC0415
        CONFIG,
        INDEX,
        PICKLED,
        SAMPLING,
        WEIGHTS,
        check,
        shard_names,
    )
    from pystaged.loading.vocabulary import TOKENIZER_FILES, read_json  # noqa: PLC0415

    name, stem = repository.name, repository.name.rpartition("/")[2]
    out = cache.repository_folder(name) / f"{stem}.{kind.upper()}.gguf"
    if cache.is_current(out, repository.revision):
        return out
    fetched, config_path = repository.fetch(CONFIG), Path(f"{name}/{CONFIG}")
    config = read_json(fetched)
    check(config, config_path, kind)
    is_draft = feature_drafts.Numbers.of(language_part(config), config_path) is not None
    if is_draft:
        feature_drafts.check_files(name, repository.files)
    weights = [WEIGHTS if WEIGHTS in repository.files else PICKLED]
    if INDEX in repository.files:
        weights = shard_names(repository.fetch(INDEX))
    others = () if is_draft else (*TOKENIZER_FILES, SAMPLING)
    for file in [*(file for file in others if file in repository.files), *weights]:
        repository.fetch(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_symlink():  # to a file of that name that the repository had before
        out.unlink()
    about = About(stem, repository.license, f"{_endpoint()}/{name}")
    quantize_checkpoint(fetched.parent, out, kind, about=about, progress=repository.progress)
    cache.save_source(out, repository.revision, repository.license)
    return out


# ---- The hub ----


@dataclass(frozen=True)
class _File:
    size: int
    etag: str


@dataclass
class _Repository:
    """A model repository at a commit, and its files by name; `downloaded` are those that were not there before."""

    name: str
    revision: str
    files: dict[str, _File]
    progress: Progress
    license: str = ""
    architecture: str | None = None  # of GGUF files
    model_type: str | None = None  # of a checkpoint
    downloaded: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, name: str, progress: Progress) -> _Repository:
        """The repository on the hub, or its copy in the cache if the hub cannot be reached."""
        from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415

        try:
            with _errors(name):
                info = _retried(lambda: HfApi(endpoint=_endpoint()).model_info(name, files_metadata=True))
        except ConnectionError as error:
            try:
                folder = Path(snapshot_download(name, local_files_only=True))
            except (OSError, ValueError):
                raise error from None
            found = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
            return cls(name, folder.name, dict.fromkeys(found, _File(0, "")), progress)
        card = info.card_data.license if info.card_data else None
        tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
        return cls(
            name,
            str(info.sha),
            {file.rfilename: _file(name, file) for file in info.siblings or ()},
            progress,
            card if isinstance(card, str) else tags[0] if tags else "",
            (info.gguf or {}).get("architecture"),
            (info.config or {}).get("model_type"),
        )

    def check_family(self, checkpoint: bool) -> None:
        """Refuse an unsupported architecture, if the hub states it, before the download."""
        found, known = (
            (self.model_type, (*MODEL_TYPES, *DRAFT_MODEL_TYPES))
            if checkpoint
            else (self.architecture, (*ARCHITECTURES, *DRAFT_ARCHITECTURES))
        )
        if found not in (None, *known):
            unknown = f"the architecture {found!r} is not supported, only {', '.join(known)}"
            raise ValueError(f"{self.name}: {not_converted(found, known) if checkpoint else unknown}")

    def fetch(self, name: str) -> Path:
        """A file, in Hugging Face's cache; downloaded and verified where it is not there yet."""
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache  # noqa: PLC0415

        if name not in self.files:
            raise FileNotFoundError(f"{self.name} has no {name}")
        cached = try_to_load_from_cache(self.name, name, revision=self.revision)
        if isinstance(cached, str):
            return Path(cached)
        size, etag = self.files[name].size, self.files[name].etag
        check_room(Path(constants.HF_HUB_CACHE), size)
        bar = _bar(lambda done: self.progress(f"downloading {name}", done, size))
        with _errors(self.name):
            # By branch, not by commit, so that it is found by name without a network.
            path = Path(_retried(lambda: hf_hub_download(self.name, name, endpoint=_endpoint(), tqdm_class=bar)))
        if not path.as_posix().endswith(f"/{self.revision}/{name}"):
            raise OSError(f"{self.name} was changed while it was downloaded; try again")
        if _checksum(path, etag) != etag:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise OSError(f"{self.name}: what was downloaded is not {name}: its checksum differs; try again")
        self.downloaded.add(name)
        return path


def _file(repository: str, found: Any) -> _File:
    """What the hub says about a file.

    Raises:
        ValueError: a name that leads out of its folder, or a checksum that is none.
    """
    name = found.rfilename
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or re.search(r"[\\\0]", name):
        raise ValueError(f"{repository} names the file {name!r}, which is outside of it; nothing was downloaded")
    etag = found.lfs.sha256 if found.lfs else found.blob_id
    if not isinstance(etag, str) or not _ETAG.fullmatch(etag):
        raise ValueError(f"{repository}: the hub gives no checksum for {name}")
    return _File((found.lfs.size if found.lfs else found.size) or 0, etag)


def _endpoint() -> str:
    """The hub; huggingface_hub reads the variable only when it is imported."""
    from huggingface_hub import constants  # noqa: PLC0415

    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn the hub's errors into ones that say what to do."""
    from huggingface_hub import errors  # noqa: PLC0415

    transport: Any = errors.HfHubHTTPError.__bases__[0]  # of whichever HTTP library this version uses
    hub = _endpoint()
    login = "log in with `hf auth login` or set HF_TOKEN"
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
    except errors.LocalEntryNotFoundError as error:
        raise ConnectionError(f"no connection to {hub} for {name}: {error.__cause__ or error}") from None
    except transport as error:
        raise ConnectionError(
            f"no connection to {hub} for {name}: {error}; check the network, then run the same again"
        ) from None


def _retried(action: Callable[[], T]) -> T:
    """Call again after temporary failures."""
    from huggingface_hub import errors  # noqa: PLC0415

    for attempt in range(1, _ATTEMPTS):
        try:
            return action()
        except errors.HfHubHTTPError as error:
            if error.response.status_code not in (408, 429, 500, 502, 503, 504):
                raise
        time.sleep(0.25 * 2**attempt)
    return action()


def _checksum(path: Path, etag: str) -> str:
    """The checksum of the etag's kind."""
    digest = hashlib.sha256()
    if len(etag) == 40:  # git's, which names the length first
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        update(digest, file)
    return digest.hexdigest()


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
