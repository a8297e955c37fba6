"""Models from a hub on loopback: huggingface_hub talks to it as to the real one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from huggingface_hub import constants, hf_hub_download
from support import hub_server
from support.checkpoints import config as checkpoint_config
from support.checkpoints import weights as checkpoint_weights
from support.checkpoints import write_checkpoint, write_family, write_weights
from support.commands import assert_refused, run
from support.convert import convert, write_pickled
from support.draft_checkpoints import FORMS, write_form
from support.hub_server import TOKEN, Fault, Hub, Repository

import pystaged
from pystaged.aliases import hub_id
from pystaged.loading import cache, hub, names

TINY = "someone/tiny"
GGUFS = "someone/tiny-GGUF"


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


@pytest.mark.parametrize("shards", [1, 3, 0])  # 0 for a pytorch_model.bin
def test_pull_a_checkpoint(tiny: Repository, online: Hub, tmp_path: Path, shards: int) -> None:
    if shards > 1:
        write_weights(tmp_path, checkpoint_weights(checkpoint_config()), shards)
        del tiny.files["model.safetensors"]
        tiny.files |= {path.name: path.read_bytes() for path in tmp_path.glob("model*")}
    if not shards:
        write_pickled(tmp_path / "pytorch_model.bin", checkpoint_weights(checkpoint_config()))
        del tiny.files["model.safetensors"]
        tiny.files["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    seen: list[str] = []
    path = hub.pull(TINY, progress=lambda what, _done, _total: seen.append(what))
    assert path == tmp_path / "cache" / "pystaged" / "models" / "someone" / "tiny" / "tiny.Q8_0.gguf"
    fields = GGUFReader(path).fields
    assert fields["general.license"].contents() == "mit"
    assert fields["general.source.url"].contents() == f"{online.url}/{TINY}"
    assert [name for name in dict.fromkeys(seen) if name.endswith(("config.json", "converting", "quantizing"))] == [
        "downloading config.json",
        "converting",
        "quantizing",
    ]
    assert leftovers(tmp_path) == []
    fetched = " ".join(request.path for request in online.requests)
    assert ("pytorch_model" in fetched) == (not shards)
    assert "README" not in fetched
    assert pystaged.generate("the tree", model=TINY, draft=None, max_tokens=4).tokens


def test_pull_a_checkpoint_of_another_family(online: Hub, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "checkpoint", "gemma3_text", shards=2, num_hidden_layers=7)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    online.repositories[TINY] = Repository(files_of(folder), about={"config": {"model_type": "gemma3_text"}})
    path = hub.pull(TINY, "q4_k_m")
    fields = GGUFReader(path).fields
    assert fields["general.architecture"].contents() == "gemma3"
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert pystaged.generate("the tree", model=TINY, draft=None, max_tokens=4).tokens


def test_a_checkpoint_with_experts_in_mxfp4_comes_with_its_tokenizer(online: Hub, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "checkpoint", "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    online.repositories[TINY] = Repository(files_of(folder), about={"config": {"model_type": "gpt_oss"}})
    hub.pull(TINY)
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
    online.repositories[GGUFS] = Repository(
        {"tiny.gguf": path.read_bytes()}, about={"gguf": {"architecture": "eagle3"}}
    )
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
def test_the_converted_model_is_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "model.gguf")
    pulled, here = (GGUFReader(path).tensors for path in (hub.pull(TINY, "f32"), tmp_path / "model.gguf"))
    assert [(t.name, t.data.tobytes()) for t in pulled] == [(t.name, t.data.tobytes()) for t in here]


def test_what_is_recommended_comes_with_a_checkpoint(tiny: Repository) -> None:
    tiny.files["generation_config.json"] = b'{"temperature": 0.6, "top_p": 0.95}'
    fields = GGUFReader(hub.pull(TINY)).fields
    found = [round(fields[f"general.sampling.{key}"].contents(), 6) for key in ("temp", "top_p")]
    assert found == [0.6, 0.95]


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


@pytest.mark.slow
def test_a_new_commit_is_pulled_anew(tiny: Repository, tmp_path: Path) -> None:
    first = hub.pull(TINY).read_bytes()
    write_weights(tmp_path, checkpoint_weights(checkpoint_config(), seed=1))
    tiny.files["model.safetensors"] = (tmp_path / "model.safetensors").read_bytes()
    assert hub.pull(TINY).read_bytes() != first


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (GGUFS, "tiny.Q8_0.gguf"),
        (f"{GGUFS}:q4_0", "tiny.Q4_0.gguf"),
        (f"{GGUFS}:tiny.F16.gguf", "tiny.F16.gguf"),
    ],
)
def test_gguf_files_are_taken_as_they_are(
    ggufs: Repository, online: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, file: str
) -> None:
    path = hub.pull(name)
    assert capfd.readouterr() == ("", "")
    assert (path.name, path.read_bytes()) == (file, ggufs.files[file])
    assert path.is_symlink()
    assert "huggingface" in str(path.resolve())
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
    assert cache.models() == []
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
    assert cache.models() == []
    assert leftovers(tmp_path) == []
    assert hub.pull(GGUFS).read_bytes() == ggufs.files["tiny.Q8_0.gguf"]


@pytest.mark.usefixtures("tiny")
def test_a_wrong_checksum_of_a_small_file(online: Hub) -> None:
    online.faults = [Fault("config.json", corrupt=True)]
    with pytest.raises(OSError, match=r"what was downloaded is not config\.json"):
        hub.pull(TINY)


@pytest.mark.parametrize(("path", "method"), [("/api/", "GET"), ("/resolve/", "HEAD"), ("/cdn/", "GET")])
def test_failures_that_pass(ggufs: Repository, online: Hub, path: str, method: str) -> None:
    online.faults = [Fault(path, status, method=method) for status in (500, 429)]
    assert hub.pull(GGUFS).read_bytes() == ggufs.files["tiny.Q8_0.gguf"]
    assert online.faults == []


@pytest.mark.usefixtures("ggufs")
def test_failures_that_stay(online: Hub) -> None:
    online.faults = [Fault("/api/", 500)] * 20
    with pytest.raises(ConnectionError, match=rf"{online.url} answers 500 for {GGUFS}; try again later"):
        hub.pull(GGUFS)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"private": True}, FileNotFoundError, "there is no model someone/tiny at .*, or it is private: check the"),
        ({"gated": True}, PermissionError, "someone/tiny is gated: accept its conditions at .*/someone/tiny, then log"),
        (
            {"about": {"config": {"model_type": "mamba"}}},
            ValueError,
            "checkpoints of 'mamba' cannot be converted, only",
        ),
        ({"files": {}}, FileNotFoundError, "has no suitable file: neither a whole GGUF file nor config.json with"),
        ({"files": {"config.json": b"{}", "pytorch_model-1.bin": b""}}, FileNotFoundError, "no suitable file"),
        ({"files": {"m-00001-of-00002.gguf": b"x"}}, FileNotFoundError, "no suitable file: neither a whole GGUF"),
        (
            {"files": {"a.gguf": b"x", "b.gguf": b"y"}},
            FileNotFoundError,
            "has several models; name one: .*tiny:a.gguf, ",
        ),
        ({"files": {"../../evil.gguf": b"x"}}, ValueError, r"names the file '\.\./\.\./evil\.gguf', which is outside"),
        ({"files": {"/etc/evil.gguf": b"x"}}, ValueError, "which is outside"),
    ],
    ids=["private", "gated", "mamba", "empty", "pickles", "split", "several", "dots", "absolute"],
)
def test_refusals(
    tiny: Repository, online: Hub, tmp_path: Path, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    for name, value in change.items():
        setattr(tiny, name, value)
    with pytest.raises(kind, match=message):
        hub.pull(TINY)
    assert downloads(online) == []
    assert cache.models() == []
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("ggufs")
def test_a_revoked_token(online: Hub) -> None:
    online.faults = [Fault("/cdn/", 403)]
    with pytest.raises(PermissionError, match=r"refuses access to someone/tiny-GGUF \(403\): log in"):
        hub.pull(GGUFS)


@pytest.mark.usefixtures("ggufs")
def test_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(PermissionError, match=r"refuses access to someone/tiny-GGUF \(401\): log in"):
        hub.pull(GGUFS)


def test_another_architecture_in_the_config(tiny: Repository, online: Hub) -> None:
    tiny.about, tiny.files["config.json"] = {}, b'{"model_type": "bert"}'
    with pytest.raises(ValueError, match="checkpoints of 'bert' cannot be converted"):
        hub.pull(TINY)
    assert downloads(online) == []


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
    listed = [model.name for model in cache.models()]
    assert listed == [f"{GGUFS}:Q4_0/model.gguf", f"{GGUFS}:Q8_0/model.gguf"]
    assert [names.resolve(name) for name in listed] == [paths[name.partition(":")[2]] for name in listed]
    assert names.resolve(f"{GGUFS}:q4_0") == paths["Q4_0/model.gguf"]
    assert online.requests == []
    for name in listed:
        assert cache.remove(name) == len(files[name.partition(":")[2]])
    assert list(cache.folder().iterdir()) == []


def test_what_belongs_to_a_model_is_taken_by_its_file_alone(online: Hub, random_gguf: Callable[..., Path]) -> None:
    files = ["tiny.Q8_0.gguf", "mmproj-tiny.Q8_0.gguf", "mtp-tiny.Q8_0.gguf"]
    online.repositories[GGUFS] = Repository(dict.fromkeys(files, random_gguf("Q8_0").read_bytes()))
    for name in (GGUFS, f"{GGUFS}:q8_0", f"{GGUFS}:mtp-tiny.Q8_0.gguf"):
        hub.pull(name)
    found = [names.resolve(f"{GGUFS}{wanted}").name for wanted in ("", ":q8_0", ":mtp-tiny.Q8_0.gguf")]
    assert found == [files[0], files[0], files[2]]
    assert [model.name for model in cache.models()] == [f"{GGUFS}:{files[2]}", f"{GGUFS}:q8_0"]
    online.repositories[GGUFS] = Repository({"mtp/mtp-tiny.Q4_0.gguf": random_gguf("Q4_0").read_bytes()})
    assert hub.pull(f"{GGUFS}:q4_0").name == "mtp-tiny.Q4_0.gguf"  # there is nothing else


def test_offline_in_folders(
    online: Hub, random_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in Hugging Face's cache, where our own knows nothing of it."""
    files = nested(online, random_gguf)
    hf_hub_download(GGUFS, "Q4_0/model.gguf", endpoint=online.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = hub.pull(f"{GGUFS}:Q4_0/model.gguf")
    assert path == tmp_path / "cache" / "pystaged" / "models" / GGUFS / "Q4_0" / "model.gguf"
    assert path.read_bytes() == files["Q4_0/model.gguf"]


@pytest.mark.usefixtures("ggufs")
def test_a_full_disk(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
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


@pytest.mark.usefixtures("ggufs")
def test_addresses_of_the_hub() -> None:
    place = names.resolve(f"hf.co/{GGUFS}:Q4_0")
    assert place.name == "tiny.Q4_0.gguf"
    assert hub.pull(f"https://huggingface.co/{GGUFS}", "q4_0") == place
    assert cache.find(f"https://hf.co/{GGUFS}:q4_0") == place
    cache.remove(f"hf.co/{GGUFS}")
    assert cache.paths() == []


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf.co/someone/tiny", "someone/tiny"),
        ("huggingface.co/someone/tiny:Q4_K_M", "someone/tiny:Q4_K_M"),
        ("https://huggingface.co/someone/tiny/", "someone/tiny"),
        ("https://huggingface.co/someone/tiny/tree/main", "someone/tiny"),
        ("https://huggingface.co/someone/tiny?library=x", "someone/tiny"),
        ("https://huggingface.co/someone/tiny/blob/main/folder/a.gguf", "someone/tiny:folder/a.gguf"),
        ("https://huggingface.co/someone/tiny/resolve/main/a.gguf?download=true", "someone/tiny:a.gguf"),
        ("https://huggingface.co/someone/tiny/raw/main/a%20b.gguf", "someone/tiny:a b.gguf"),
        ("https://huggingface.co/someone/tiny/tree/main/Q4_0/", "someone/tiny:Q4_0"),
        ("HTTPS://HF.co/Someone/Tiny", "Someone/Tiny"),
        ("http://www.huggingface.co:443/someone/tiny:q8_0", "someone/tiny:q8_0"),
        ("hf.co/someone/tiny:folder/a.gguf", "someone/tiny:folder/a.gguf"),
        ("hf.co.gguf", "hf.co.gguf"),
        ("someone/tiny:q8_0", "someone/tiny:q8_0"),
        ("/models/hf.co/someone/tiny", "/models/hf.co/someone/tiny"),
    ],
)
def test_what_an_address_stands_for(address: str, name: str) -> None:
    assert hub_id(address) == name


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "/someone",
        "/datasets/someone/tiny",
        "/spaces/someone",
        "/someone/tiny/resolve/0123abcd/a.gguf",
        "/someone/tiny/tree/dev",
        "/someone/tiny/blob/main",
        "/someone/tiny/commits/main",
        "/someone/tiny/discussions/1",
    ],
)
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
    found = {model.name: model for model in cache.models()}
    assert list(found) == ["someone/tiny-GGUF:q8_0", "someone/tiny:q4_0"]
    assert [(model.type, model.shape, model.license) for model in found.values()] == [
        ("Q8_0", "2 x 64, 2 heads", "apache-2.0"),
        ("Q4_0", "2 x 64, 2 heads", "mit"),
    ]
    assert found["someone/tiny-GGUF:q8_0"].bytes == len(ggufs.files["tiny.Q8_0.gguf"])


@pytest.mark.usefixtures("tiny")
def test_remove(ggufs: Repository, tmp_path: Path) -> None:
    converted, linked = hub.pull(TINY), hub.pull(GGUFS)
    sizes = [path.stat().st_size for path in (converted, linked)]
    blob = linked.resolve()
    assert [cache.remove("tiny"), cache.remove(GGUFS)] == sizes
    assert not blob.exists()
    assert cache.models() == []
    assert list((tmp_path / "cache" / "pystaged" / "models").iterdir()) == []
    with pytest.raises(FileNotFoundError, match="there is no model 'tiny' in the cache"):
        cache.remove("tiny")
    assert hub.pull(GGUFS).read_bytes() == ggufs.files["tiny.Q8_0.gguf"]


def test_remove_leaves_what_a_users_own_link_leads_to(tmp_path: Path, random_gguf: Callable[..., Path]) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(random_gguf("Q8_0").read_bytes())
    for number, target in enumerate((own, Path(os.path.relpath(own, cache.folder() / "me" / "mine")))):
        link = cache.folder() / "me" / "mine" / f"{number}.gguf"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
        assert cache.remove(f"me/mine:{number}.gguf") == 0
        assert not link.is_symlink()
    assert own.read_bytes() == random_gguf("Q8_0").read_bytes()


def test_remove_leaves_what_another_program_downloaded(ggufs: Repository, online: Hub) -> None:
    before = Path(hf_hub_download(GGUFS, "tiny.Q8_0.gguf", endpoint=online.url))
    path = hub.pull(GGUFS)
    assert cache.remove(GGUFS) == 0
    assert not path.is_symlink()
    assert before.read_bytes() == ggufs.files["tiny.Q8_0.gguf"]


def test_what_was_removed_and_downloaded_by_another_is_no_longer_ours(ggufs: Repository, online: Hub) -> None:
    hub.pull(f"{GGUFS}:q4_0")
    assert hub.pull(GGUFS) == cache.find(f"{GGUFS}:q8_0")
    assert cache.remove(f"{GGUFS}:q8_0") > 0
    other = Path(hf_hub_download(GGUFS, "tiny.Q8_0.gguf", endpoint=online.url))
    hub.pull(f"{GGUFS}:q8_0")
    assert cache.remove(f"{GGUFS}:q8_0") == 0
    assert other.read_bytes() == ggufs.files["tiny.Q8_0.gguf"]


def test_remove_leaves_what_another_snapshot_has(ggufs: Repository, online: Hub) -> None:
    mine = hub.pull(GGUFS).resolve()
    ggufs.files["README.md"] = b"a new commit"
    other = Path(hf_hub_download(GGUFS, "tiny.Q8_0.gguf", endpoint=online.url))
    assert other.resolve() == mine
    assert cache.remove(GGUFS) == 0
    assert other.read_bytes() == ggufs.files["tiny.Q8_0.gguf"]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nested_brackets(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.usefixtures("tiny")
def test_a_license_that_terminals_cannot_show() -> None:
    path = hub.pull(TINY)
    path.with_name("source.json").write_text(r'{"license": "mit\ud800\u001b[31m"}')
    assert [model.license for model in cache.models()] == ["mit??[31m"]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("spoil", [fifo, endless, nested_brackets])
def test_what_a_source_file_may_be(spoil: Callable[[Path], None]) -> None:
    path = hub.pull(TINY)
    source = path.with_name("source.json")
    kept = source.read_bytes()
    source.unlink()
    spoil(source)
    assert [model.license for model in cache.models()] == [""]
    hub.pull(TINY)
    assert not source.is_symlink()
    assert source.read_bytes() == kept


@pytest.mark.usefixtures("tiny")
def test_a_damaged_file_is_listed() -> None:
    hub.pull(TINY).write_bytes(b"no model")
    assert [(model.type, model.shape) for model in cache.models()] == [("damaged", "")]


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
    names = [line.split()[0] for line in listed]
    assert [name for name in names if name.startswith("someone/")] == ["someone/tiny-GGUF:q8_0", "someone/tiny:q8_0"]
    assert run("info", "tiny", **home).returncode == 0
    unfinished = path.with_name(f"{path.name}.{'0' * 16}.part")
    unfinished.write_bytes(bytes(3_000_000))
    assert b"1 unfinished file of killed processes, 3.0 MB" in run("models", **home).stderr
    assert run("models", "remove", "--leftovers", **home).stderr == b"removed 1 unfinished file, 3.0 MB freed\n"
    assert not unfinished.exists()
    assert b"removed, 0." in run("models", "remove", "tiny", **home).stderr
    assert not path.exists()
    done = run("models", "remove", **home)
    said = " ".join(done.stderr.decode().replace("│", " ").split())  # the frame wraps it
    assert (done.returncode, "name a model, --packed, --recycled, --distilled or --leftovers" in said) == (2, True)
    assert_refused(run("models", "remove", "tiny", **home), "there is no model 'tiny' in the cache")
    assert_refused(run("pull", "someone/nothing", **home), "there is no model someone/nothing")
