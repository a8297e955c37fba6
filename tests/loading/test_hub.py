"""Models from a hub on loopback: huggingface_hub talks to it as to the real one."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFReader
from huggingface_hub import constants, hf_hub_download
from support import hub_server
from support.checkpoints import config as checkpoint_config
from support.checkpoints import weights as checkpoint_weights
from support.checkpoints import write_checkpoint, write_family, write_weights
from support.commands import assert_refused, run
from support.draft_checkpoints import FORMS, write_form
from support.hub_server import TOKEN, Fault, Hub, Repository
from support.paths import table

import pystaged
from pystaged.loading import cache, hub, names
from pystaged.loading.tables import table_path
from pystaged.options.aliases import hub_id

TINY = "someone/tiny"
GGUFS = "someone/tiny-GGUF"
CONFIG = json.dumps(checkpoint_config()).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server.running() as running:
        yield running


@pytest.fixture
def online(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub as the one to ask, fresh caches, no waiting."""
    server.repositories, server.faults, server.requests = {}, [], []
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # huggingface_hub reads these when it is imported.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "huggingface" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    monkeypatch.setattr("time.sleep", lambda _: None)
    return server


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny GPT-2."""
    return files_of(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def tiny(online: Hub, checkpoint: dict[str, bytes]) -> Repository:
    """A repository with a checkpoint."""
    online.repositories[TINY] = Repository(
        dict(checkpoint) | {"README.md": b"# tiny", "pytorch_model.bin": b"pickle"},
        about={"cardData": {"license": "mit"}, "config": {"model_type": "gpt2"}},
    )
    return online.repositories[TINY]


@pytest.fixture
def ggufs(online: Hub, random_gguf: Callable[..., Path]) -> Repository:
    """A repository of GGUF files."""
    online.repositories[GGUFS] = Repository(
        {f"tiny.{kind}.gguf": random_gguf(kind).read_bytes() for kind in ("F16", "Q8_0", "Q4_0")},
        about={"tags": ["gguf", "license:apache-2.0"], "gguf": {"architecture": "gpt2"}},
    )
    return online.repositories[GGUFS]


def downloads(server: Hub) -> list[hub_server.Request]:
    """Requests of a large file's bytes."""
    return [request for request in server.requests if request.path.startswith("/cdn/") and request.method == "GET"]


def leftovers(tmp_path: Path) -> list[str]:
    """Unfinished files anywhere."""
    return [path.name for path in (tmp_path / "cache").rglob("*") if path.suffix in (".part", ".incomplete")]


# ---- What is got ----


@pytest.mark.parametrize("shards", [1, 3])
def test_pull_a_checkpoint(tiny: Repository, online: Hub, tmp_path: Path, shards: int) -> None:
    if shards > 1:
        write_weights(tmp_path, checkpoint_weights(checkpoint_config()), shards)
        del tiny.files["model.safetensors"]
        tiny.files |= {path.name: path.read_bytes() for path in tmp_path.glob("model*")}
    seen: list[str] = []
    path = hub.pull(TINY, progress=lambda what, _done, _total: seen.append(what))
    assert path == tmp_path / "cache" / "pystaged" / "models" / "someone" / "tiny" / "tiny.Q8_0.gguf"
    fields = GGUFReader(path).fields
    assert fields["general.license"].contents() == "mit"
    assert fields["general.source.url"].contents() == f"{online.url}/{TINY}"
    told = [name for name in dict.fromkeys(seen) if name.endswith(("config.json", "converting", "quantizing"))]
    assert told == ["downloading config.json", "converting", "quantizing"]
    assert leftovers(tmp_path) == []
    fetched = " ".join(request.path for request in online.requests)
    assert "pytorch_model" not in fetched
    assert "README" not in fetched
    assert pystaged.generate("the tree", model=TINY, draft=None, max_tokens=4).tokens


def test_pull_a_checkpoint_of_another_family(online: Hub, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "checkpoint", "gemma3_text", shards=2, num_hidden_layers=7)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    more = {f"additional_chat_templates/{name}.jinja": name.encode() for name in ("tool_use", "deeper/x")}
    online.repositories[TINY] = Repository(files_of(folder) | more, about={"config": {"model_type": "gemma3_text"}})
    path = hub.pull(TINY, "q4_k_m")
    fields = GGUFReader(path).fields
    assert fields["general.architecture"].contents() == "gemma3"
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert fields["tokenizer.chat_templates"].contents() == ["tool_use"]
    assert fields["tokenizer.chat_template.tool_use"].contents() == "tool_use"
    assert pystaged.generate("the tree", model=TINY, draft=None, max_tokens=4).tokens


@pytest.mark.parametrize("form", ["AngelSlim", "Speculators"])
def test_pull_a_draft_that_reads_hidden_states(online: Hub, tmp_path: Path, form: str) -> None:
    folder = write_form(tmp_path / "draft", FORMS[form]())
    kind = "speculator_model" if form == "Speculators" else "llama"
    online.repositories[TINY] = Repository(files_of(folder), about={"config": {"model_type": kind}})
    with pytest.raises(ValueError, match=r"cannot be q4_k_m, only .*q4_0"):
        hub.pull(f"{TINY}:q4_k_m")
    assert downloads(online) == []
    path = hub.pull(f"{TINY}:q4_0")
    assert path.name == "tiny.Q4_0.gguf"
    assert {tensor.tensor_type.name for tensor in GGUFReader(path).tensors} == {"F32", "I64", "Q4_0"}
    about = {"gguf": {"architecture": "eagle3"}}
    online.repositories[GGUFS] = Repository({"tiny.gguf": path.read_bytes()}, about=about)
    assert hub.pull(GGUFS).read_bytes() == path.read_bytes()
    assert cache.find(f"{TINY}:q4_0") == path


def test_a_draft_with_a_mask_embedding_is_refused_before_its_weights_come(online: Hub, tmp_path: Path) -> None:
    folder = write_form(tmp_path / "draft", FORMS["DSpark"]())
    (folder / "mask_embedding.pt").write_bytes(b"a pickle")
    online.repositories[TINY] = Repository(files_of(folder), about={"config": {"model_type": "qwen3"}})
    with pytest.raises(ValueError, match="mask embedding"):
        hub.pull(f"{TINY}:q4_0")
    assert not any("safetensors" in each for each in downloads(online))


@pytest.mark.usefixtures("tiny")
def test_a_second_pull_does_nothing(online: Hub) -> None:
    path = hub.pull(TINY)
    before = path.stat().st_mtime_ns
    online.requests.clear()
    assert hub.pull(TINY) == path
    assert path.stat().st_mtime_ns == before
    assert [request.path.partition("?")[0] for request in online.requests] == [f"/api/models/{TINY}"]
    # Another type is made of what is here.
    assert hub.pull(TINY, "F16").name == "tiny.F16.gguf"
    assert downloads(online) == []


@pytest.mark.parametrize(
    ("name", "file"),
    [(GGUFS, "tiny.Q8_0.gguf"), (f"{GGUFS}:q4_0", "tiny.Q4_0.gguf"), (f"{GGUFS}:tiny.F16.gguf", "tiny.F16.gguf")],
)
def test_gguf_files_are_taken_as_they_are(
    ggufs: Repository, online: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, file: str
) -> None:
    path = hub.pull(name)
    assert capfd.readouterr() == ("", "")
    assert (path.name, path.read_bytes()) == (file, ggufs.files[file])
    assert path.is_relative_to(constants.HF_HUB_CACHE)
    assert len(downloads(online)) == 1
    assert leftovers(tmp_path) == []
    assert pystaged.generate("the tree", model=name, draft=None, max_tokens=4).tokens
    assert len(downloads(online)) == 1


@pytest.mark.usefixtures("tiny", "ggufs")
def test_loading_downloads_what_is_named() -> None:
    lines: list[str] = []
    with pystaged.load(TINY, draft=f"{GGUFS}:q8_0", report=lines.append) as engine:
        assert engine.generate("the tree", max_tokens=4).tokens
        assert engine.draft is not None
    assert "downloading model.safetensors" in lines
    assert "downloading tiny.Q8_0.gguf" in lines


def test_a_token_goes_to_the_hub_alone(tiny: Repository, online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.pull(TINY)
    assert {request.token for request in online.requests if not request.path.startswith("/cdn/")} == {TOKEN}
    assert {request.token for request in downloads(online)} == {""}


# ---- What goes wrong on the way ----


def test_an_interrupted_connection(ggufs: Repository, online: Hub) -> None:
    online.faults = [Fault("/cdn/", cut_after=1000), Fault("/cdn/", cut_after=500)]
    assert hub.pull(GGUFS).read_bytes() == ggufs.files["tiny.Q8_0.gguf"]
    assert [request.range for request in downloads(online)] == ["", "bytes=1000-", "bytes=1500-"]


def test_an_interrupted_run_leaves_nothing(ggufs: Repository, tmp_path: Path) -> None:
    def interrupt(_what: str, done: int, _total: int) -> None:
        if done == 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull(GGUFS, progress=interrupt)
    assert cache.files() == {}
    assert leftovers(tmp_path) == []
    seen: list[tuple[int, int]] = []
    path = hub.pull(GGUFS, progress=lambda _what, done, total: seen.append((done, total)))
    data = ggufs.files["tiny.Q8_0.gguf"]
    assert path.read_bytes() == data
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(data), len(data))


def test_a_wrong_checksum(ggufs: Repository, online: Hub, tmp_path: Path) -> None:
    online.faults = [Fault("/cdn/", corrupt=True)]
    with pytest.raises(OSError, match=r"what was downloaded is not tiny\.Q8_0\.gguf: its checksum differs"):
        hub.pull(GGUFS)
    assert cache.files() == {}
    assert leftovers(tmp_path) == []
    assert hub.pull(GGUFS).read_bytes() == ggufs.files["tiny.Q8_0.gguf"]


@pytest.mark.parametrize(("path", "method"), [("/resolve/", "HEAD"), ("/cdn/", "GET")])
def test_failures_that_pass(ggufs: Repository, online: Hub, path: str, method: str) -> None:
    online.faults = [Fault(path, status, method=method) for status in (500, 429)]
    assert hub.pull(GGUFS).read_bytes() == ggufs.files["tiny.Q8_0.gguf"]
    assert online.faults == []


@pytest.mark.usefixtures("ggufs")
def test_failures_that_stay(online: Hub) -> None:
    online.faults = [Fault("/api/", 500)] * 20
    with pytest.raises(ConnectionError, match=rf"{online.url} answers 500 for {GGUFS}; try again later"):
        hub.pull(GGUFS)


@pytest.mark.parametrize(("change", "kind", "message"), table("hub_refusals"))
def test_refusals(
    tiny: Repository, online: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, kind: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name, value in change.items():
        contents = {"CONFIG": CONFIG}  # others are spelled
        setattr(tiny, name, {n: contents.get(v, v.encode()) for n, v in value.items()} if name == "files" else value)
    with pytest.raises(getattr(builtins, kind), match=message):
        hub.pull(TINY)
    assert downloads(online) == []
    assert cache.files() == {}
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("ggufs")
def test_a_revoked_token(online: Hub) -> None:
    online.faults = [Fault("/cdn/", 403)]
    with pytest.raises(PermissionError, match=r"refuses access to someone/tiny-GGUF \(403\): log in"):
        hub.pull(GGUFS)


def test_a_hostile_index(tiny: Repository, tmp_path: Path) -> None:
    tiny.files["model.safetensors.index.json"] = b'{"weight_map": {"wte.weight": "../../../secret.safetensors"}}'
    with pytest.raises(ValueError, match=r"names the file '\.\./\.\./\.\./secret\.safetensors'"):
        hub.pull(TINY)
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("ggufs")
def test_no_such_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"no single file that fits q6_k; name one: .*tiny-GGUF:tiny.F16.gguf"):
        hub.pull(f"{GGUFS}:q6_k")


@pytest.mark.usefixtures("tiny")
def test_no_such_type() -> None:
    with pytest.raises(ValueError, match="unknown type 'q9': choose from f32"):
        hub.pull(TINY, "q9")
    with pytest.raises(FileNotFoundError, match="has no q9; its checkpoint can be converted to: f32"):
        hub.pull(f"{TINY}:q9")


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "../x", "someone/..", "", "someone/tiny:"])
def test_malformed_names(name: str) -> None:
    with pytest.raises(ValueError, match="is no hub id"):
        hub.pull(name)


@pytest.mark.usefixtures("online")
def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"no connection to http://127\.0\.0\.1:9 for someone/tiny: .*check the"):
        hub.pull(TINY)


@pytest.mark.usefixtures("tiny")
def test_offline(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the caches serves; what is not is said to be missing."""
    hub.pull(TINY)
    online.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert names.resolve(TINY).name == "tiny.Q8_0.gguf"
    assert hub.pull(TINY, "f16").name == "tiny.F16.gguf"
    with pytest.raises(ConnectionError, match=r"someone/other is not in the cache, and HF_HUB_OFFLINE forbids asking"):
        hub.pull("someone/other")
    assert online.requests == []


def nested(online: Hub, random_gguf: Callable[..., Path]) -> dict[str, bytes]:
    """A repository whose files differ by their folders only."""
    files = {f"{kind}/model.gguf": random_gguf(kind).read_bytes() for kind in ("Q8_0", "Q4_0")}
    online.repositories[GGUFS] = Repository(dict(files))
    return files


def test_files_of_one_name_in_several_folders(online: Hub, random_gguf: Callable[..., Path]) -> None:
    files = nested(online, random_gguf)
    paths = {name: hub.pull(f"{GGUFS}:{name}") for name in files}
    assert {name: path.read_bytes() for name, path in paths.items()} == files
    assert hub.pull(GGUFS) == paths["Q8_0/model.gguf"]
    assert hub.pull(f"{GGUFS}:q4_0") == paths["Q4_0/model.gguf"]
    online.requests.clear()
    listed = [*cache.files()]
    assert listed == [f"{GGUFS}:Q4_0/model.gguf", f"{GGUFS}:Q8_0/model.gguf"]
    assert [names.resolve(name) for name in listed] == [paths[name.partition(":")[2]] for name in listed]
    assert names.resolve(f"{GGUFS}:q4_0") == paths["Q4_0/model.gguf"]
    assert online.requests == []
    for name in listed:
        assert cache.remove(name) == len(files[name.partition(":")[2]])
    assert not any(Path(constants.HF_HUB_CACHE).glob("models--*"))


def test_what_belongs_to_a_model_is_taken_by_its_file_alone(online: Hub, random_gguf: Callable[..., Path]) -> None:
    files = ["tiny.Q8_0.gguf", "mmproj-tiny.Q8_0.gguf", "mtp-tiny.Q8_0.gguf"]
    online.repositories[GGUFS] = Repository(dict.fromkeys(files, random_gguf("Q8_0").read_bytes()))
    for name in (GGUFS, f"{GGUFS}:q8_0", f"{GGUFS}:mtp-tiny.Q8_0.gguf"):
        hub.pull(name)
    found = [names.resolve(f"{GGUFS}{wanted}").name for wanted in ("", ":q8_0", ":mtp-tiny.Q8_0.gguf")]
    assert found == [files[0], files[0], files[2]]
    assert [*cache.files()] == [f"{GGUFS}:{files[2]}", f"{GGUFS}:q8_0"]
    online.repositories[GGUFS] = Repository({"mtp/mtp-tiny.Q4_0.gguf": random_gguf("Q4_0").read_bytes()})
    assert hub.pull(f"{GGUFS}:q4_0").name == "mtp-tiny.Q4_0.gguf"  # there is nothing else


def test_types_as_unsloth_names_them(online: Hub, random_gguf: Callable[..., Path]) -> None:
    data = random_gguf("Q8_0").read_bytes()
    files = ["T-UD-Q4_K_XL.gguf", "T-UD-Q5_K_XL.gguf", "T-Q5_K_XL.gguf", "mmproj-F16.gguf"]
    files += ["T-IQ4_XS-00001-of-00001.gguf"]
    files += [f"BF16/T-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]
    online.repositories[GGUFS] = Repository(dict.fromkeys(files, data))
    with pytest.raises(FileNotFoundError, match=rf"no single file that fits Q5_K_XL; name one: .*{files[1]}"):
        names.resolve(f"hf.co/{GGUFS}:Q5_K_XL")
    with pytest.raises(FileNotFoundError, match=r"has BF16/T-BF16\.gguf in several files, .*include 'BF16/T-BF16-\*',"):
        names.resolve(f"{GGUFS}:BF16")
    for wanted, file in (("Q4_K_XL", 0), ("ud-q4_k_xl", 0), ("UD-Q5_K_XL", 1), ("IQ4_XS", 4)):
        assert names.resolve(f"hf.co/{GGUFS}:{wanted}").name == files[file]


def test_what_another_program_downloaded(
    online: Hub, random_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    nested(online, random_gguf)
    path = Path(hf_hub_download(GGUFS, "Q4_0/model.gguf", endpoint=online.url))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.pull(f"{GGUFS}:Q4_0/model.gguf") == names.resolve("tiny-GGUF") == path


@pytest.mark.usefixtures("ggufs")
def test_a_full_disk(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"no room in .*: 0\.00 GB are needed, 0\.00 GB are free"):
        hub.pull(GGUFS)
    assert downloads(online) == []


# ---- Names ----


@pytest.mark.slow
@pytest.mark.usefixtures("tiny", "ggufs")
def test_names_in_the_cache(online: Hub) -> None:
    hub.pull(TINY, "q8_0")
    hub.pull(TINY, "q4_0")
    online.requests.clear()
    for name in (TINY, "tiny", "tiny:q8_0", f"{TINY}:Q8_0", f"{TINY}:tiny.Q8_0.gguf"):
        assert names.resolve(name).name == "tiny.Q8_0.gguf"
    assert names.resolve("tiny:q4_0").name == "tiny.Q4_0.gguf"
    assert online.requests == []


@pytest.mark.parametrize(("address", "name"), table("addresses"))
def test_what_an_address_stands_for(address: str, name: str) -> None:
    assert hub_id(address) == name


@pytest.mark.parametrize("rest", table("other_addresses"))
def test_other_addresses_of_the_hub_are_refused(online: Hub, rest: str) -> None:
    with pytest.raises(ValueError, match=r"huggingface.co\S* is not the address of a model; give hf.co/OWNER/NAME,"):
        names.resolve(f"https://huggingface.co{rest}")
    assert online.requests == []


@pytest.mark.usefixtures("tiny")
def test_ambiguous_names() -> None:
    hub.pull(TINY, "f16")
    hub.pull(TINY, "f32")
    with pytest.raises(ValueError, match="'tiny' may be any of someone/tiny:f16, someone/tiny:f32; name one of them"):
        names.resolve("tiny")


@pytest.mark.parametrize("name", ["nothing", "folder/model.gguf", "/nowhere/model.gguf"])
def test_paths_are_never_looked_up(online: Hub, name: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no model file"):
        names.resolve(name)
    assert online.requests == []


# ---- The cache ----


@pytest.mark.usefixtures("tiny")
def test_models(ggufs: Repository) -> None:
    hub.pull(TINY, "q4_0")
    hub.pull(GGUFS)
    found, shape = cache.files(), "2 x 64, 2 heads"
    assert list(found) == ["someone/tiny-GGUF:q8_0", "someone/tiny:q4_0"]
    assert [cache.about(path) for path in found.values()] == [("Q8_0", shape, ""), ("Q4_0", shape, "mit")]
    assert found["someone/tiny-GGUF:q8_0"].read_bytes() == ggufs.files["tiny.Q8_0.gguf"]
    found["someone/tiny:q4_0"].write_bytes(b"no model")
    assert cache.about(found["someone/tiny:q4_0"]) == ("damaged", "", "")


@pytest.mark.usefixtures("tiny")
def test_remove(ggufs: Repository) -> None:
    ggufs.files["README.md"] = b"of another program"
    converted, downloaded = hub.pull(TINY), hub.pull(GGUFS)
    hf_hub_download(GGUFS, "README.md", endpoint=hub._endpoint())
    sizes = [path.stat().st_size for path in (converted, downloaded)]
    blob = downloaded.resolve()
    table = table_path(downloaded)
    assert table.parent == cache.folder(GGUFS)
    table.parent.mkdir()
    table.write_bytes(b"n-grams")
    assert [cache.remove("tiny"), cache.remove(GGUFS)] == sizes
    assert not blob.exists()
    assert cache.files() == {}
    assert downloaded.with_name("README.md").read_bytes() == b"of another program"
    assert list(cache.folder().iterdir()) == []
    with pytest.raises(FileNotFoundError, match="there is no model 'tiny' in the cache"):
        cache.remove("tiny")
    assert hub.pull(GGUFS).read_bytes() == ggufs.files["tiny.Q8_0.gguf"]


def test_of_several_commits_the_newest_is_used_and_all_are_removed(
    ggufs: Repository, random_gguf: Callable[..., Path]
) -> None:
    first = hub.pull(GGUFS)
    ggufs.files["tiny.Q8_0.gguf"] = random_gguf("F16").read_bytes()
    second = hub.pull(GGUFS)
    assert first != second == names.resolve(GGUFS)
    assert cache.remove(GGUFS) == sum(map(len, (random_gguf("Q8_0").read_bytes(), random_gguf("F16").read_bytes())))
    assert cache.files() == {}


def test_remove_after_an_interrupted_download(ggufs: Repository) -> None:
    """huggingface_hub's scan leaves out a repository whose branch names no commit."""
    path = hub.pull(GGUFS)
    (path.parents[2] / "refs" / "main").write_text("")
    assert cache.remove(GGUFS) == len(ggufs.files["tiny.Q8_0.gguf"])
    assert cache.files() == {}
    assert hub.pull(GGUFS).read_bytes() == ggufs.files["tiny.Q8_0.gguf"]


@pytest.mark.usefixtures("ggufs")
def test_remove_leaves_what_is_not_of_the_cache_and_what_another_name_has(tmp_path: Path) -> None:
    path = hub.pull(GGUFS)
    (path.parent / "config.json").write_text("{}")
    outside = tmp_path / "mine.gguf"
    outside.write_bytes(path.read_bytes())
    linked, other = path.with_name("linked.Q8_0.gguf"), path.with_name("other.gguf")
    linked.symlink_to(outside)
    other.symlink_to(path.resolve())
    assert cache.remove(f"{GGUFS}:{linked.name}") == 0
    assert (outside.exists(), linked.is_symlink()) == (True, False)
    assert cache.remove(f"{GGUFS}:{path.name}") == 0
    assert other.read_bytes() == outside.read_bytes()
    assert cache.remove(f"{GGUFS}:{other.name}") == outside.stat().st_size


def test_what_older_versions_kept(ggufs: Repository, random_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """A link into Hugging Face's cache goes, its model stays; a model that was made, and a user's own link, stay."""
    shared, mine = hub.pull(GGUFS), tmp_path / "mine.gguf"
    mine.write_bytes(random_gguf("Q4_0").read_bytes())
    old, made = (cache.folder(name) / "tiny.Q8_0.gguf" for name in (GGUFS, "someone/made"))
    own = cache.folder("me/own") / "0.gguf"
    for link, target in ((old, shared), (own, mine)):
        link.parent.mkdir(parents=True)
        link.with_name("source.json").write_text("{}")
        link.symlink_to(target)
    made.parent.mkdir()
    made.write_bytes(shared.read_bytes())
    assert cache.files() == {"me/own:0.gguf": own, "someone/made:q8_0": made, f"{GGUFS}:q8_0": shared}
    assert not old.parent.exists()
    assert [cache.remove("own"), cache.remove("made")] == [0, len(ggufs.files["tiny.Q8_0.gguf"])]
    assert list(cache.folder().iterdir()) == []
    assert mine.read_bytes() == random_gguf("Q4_0").read_bytes()


# ---- The command line ----


@pytest.mark.slow
@pytest.mark.usefixtures("tiny", "ggufs")
def test_commands(online: Hub, tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": online.url}
    done = run("pull", TINY, "--type", "q8_0", **home)
    path = Path(done.stdout.decode().strip())
    assert (done.returncode, path.name) == (0, "tiny.Q8_0.gguf"), done.stderr
    for words in (b"downloading model.safetensors", b"converting", b"quantizing", b"100%"):
        assert words in done.stderr
    done = run("generate", "the tree", "--model", TINY, "--draft", GGUFS, "--max-tokens", "4", **home)
    assert done.returncode == 0, done.stderr
    assert b"downloading tiny.Q8_0.gguf" in done.stderr
    done = run("models", **home)
    assert b"downloading" not in done.stderr
    listed = done.stdout.decode().splitlines()
    assert listed[0].split() == ["name", "MB", "type", "shape", "license"]
    found = [line.split() for line in listed]
    assert ["someone/tiny:q8_0", "Q8_0"] in [[name, kind] for name, _, kind, *_ in found]
    assert ["someone/tiny:q8_0", "recycled", "candidates"] in [[name, *kind] for name, _, *kind in found]
    assert run("info", "tiny", **home).returncode == 0
    unfinished = path.with_name(f"{path.name}.{'0' * 16}.part")
    unfinished.write_bytes(bytes(3_000_000))
    listed = run("models", **home).stdout.decode().splitlines()
    assert ["3.0", "unfinished", "files"] in [line.split() for line in listed]
    assert run("models", "remove", "--leftovers", **home).stderr == b"removed unfinished files: 1 file, 3.0 MB freed\n"
    assert run("models", "remove", "--costs", **home).stderr.startswith(b"removed costs of passes: ")
    assert not unfinished.exists()
    assert run("models", "remove", "tiny", **home).stderr.startswith(b"removed tiny")
    assert not path.exists()
    done = run("models", "remove", **home)
    said = " ".join(done.stderr.decode().replace("│", " ").split())  # the frame wraps it
    assert (done.returncode, "name a model, or --packed, --recycled," in said) == (2, True)
    assert_refused(run("models", "remove", "tiny", **home), "there is no model 'tiny' in the cache")
    assert_refused(run("pull", "someone/nothing", **home), "there is no model someone/nothing")
