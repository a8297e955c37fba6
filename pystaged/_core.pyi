"""The compiled engine. Every method that computes releases the GIL; sessions may be used from several threads.
Attributes are read-only."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

_Ints = Sequence[int] | NDArray[np.integer]
_Path = str | bytes | PathLike[str] | PathLike[bytes]

class ModelError(OSError):
    """A model file that is missing, damaged or not supported."""

class UnsupportedModelError(ModelError):
    """A model that pystaged's kernels do not compute; llama.cpp may."""

class DeviceError(OSError):
    """A device that is missing, has too little memory, or failed in a pass."""

class ContextFullError(ValueError):
    """The context has too few free positions for the tokens."""

def kernels() -> list[str]:
    """Kernels this CPU can run, best first."""

def metadata(path: _Path) -> dict[str, str]:
    """Scalar metadata of a GGUF file, as text. Raises ModelError."""

class Cores:
    """Numbers of physical cores."""

    found: int
    """Those that the process may use."""
    apart: int
    """Those of them that are left out, because they lack the L3 cache that most others have."""
    quota: int
    """CPUs that control groups grant the process, rounded up; 0 without a limit."""
    few: int
    """To compute on in passes of fewer than 16 rows, and in libraries whose threads wait for each other."""
    many: int
    """To compute on in other passes."""

def choose_cores(root: _Path = "", cpus: Sequence[int] | None = None) -> Cores:
    """The cores for this process to compute on; with `cpus`, for one that may run on these logical CPUs of a machine
    whose Linux has its files under `root`."""

def devices() -> list[tuple[str, str, bool, int, int]]:
    """ggml's devices: name, description, whether it is a GPU, free and total bytes of memory."""

def file_identity(path: _Path) -> int:
    """A hash of a GGUF file's metadata, sizes, modification times and the first weights of each tensor. Raises
    ModelError as Model."""

def quantize(
    source: _Path,
    out: _Path,
    file_type: int,
    allow_requantize: bool,
    dry_run: bool,
) -> bool:
    """Write a GGUF file in another type with libllama's quantizer, which logs to standard error.

    Args:
        file_type: llama.cpp's number of the type.
        dry_run: only log the sizes of the tensors; write no file.

    Returns:
        Whether it succeeded; the log says why not.
    """

def rpc_version() -> tuple[int, int]:
    """Major and minor version of ggml's RPC protocol. Raises DeviceError if the installed llama-cpp-python lacks it."""

def serve_devices(endpoint: str, device: str, num_threads: int) -> None:
    """Lend a device of this machine to others over ggml's RPC, until the process ends. Raises DeviceError if there is
    no such device, no RPC in the installed llama-cpp-python, or the port is taken."""

@overload
def gumbel(seed: int, position: int, token: int) -> float: ...
@overload
def gumbel(seed: int, position: int, token: NDArray[np.int32]) -> NDArray[np.float32]:
    """The noise shared by every model for tokens at a position (Philox4x32-10, Salmon et al. 2011)."""

def read_bandwidth(num_bytes: int, num_threads: int) -> float:
    """Bytes per second at which this many threads read memory, the median of several rounds."""

def dot_rate(kernel: str, num_threads: int) -> float:
    """Multiply-adds of int8 per second by this many threads of a kernel ("" for the best) that read nothing, the best
    of several rounds."""

class LogitRules:
    """Changes of logits before filtering; SamplingConfig describes the fields. Raises ValueError that names a field out
    of range.

    Args:
        logit_bias: by token.
        end_tokens: tokens excluded while a text has fewer than `min_length` tokens.
        dry_breakers: sequences of tokens at which a repetition ends.
    """

    def __init__(
        self,
        *,
        logit_bias: Sequence[tuple[int, float]] = (),
        end_tokens: Sequence[int] = (),
        min_length: int = 0,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_last_n: int = 64,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = -1,
        dry_breakers: Sequence[Sequence[int]] = (),
    ) -> None: ...

class Sampling:
    """How the target's token is chosen. Raises ValueError that names a field out of range.

    Args:
        logprobs: number of likeliest tokens whose log-probabilities Work.verify brings, besides the chosen token's; -1
            for no log-probabilities.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        *,
        typical_p: float = 1.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        temperature_last: bool = False,
        logprobs: int = -1,
        rules: LogitRules | None = None,
    ) -> None: ...

class Tokenizer:
    """libllama's tokenizer of a GGUF file. Raises ModelError if the file has no usable vocabulary."""

    def __init__(self, path: _Path) -> None: ...
    num_tokens: int
    metadata: dict[str, str]
    """Scalar metadata of the file when it was read, as text."""
    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> NDArray[np.int32]:
        """Token ids of a text.

        Args:
            add_special: add the BOS and EOS tokens that the vocabulary asks for.
            parse_special: recognize control tokens spelled in the text; user-defined tokens always are.

        Raises:
            UnicodeEncodeError: the text cannot be written as UTF-8.
            ValueError: the vocabulary has no tokens for a character, or the text has a run of more than 2**20 bytes
                without white space, or of white space.
        """
    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for, possibly part of a character; empty for control tokens unless `special`."""
    def decode(self, tokens: _Ints, special: bool = False) -> str:
        """The text of tokens, without control tokens unless `special`. Bytes that are not UTF-8 become U+FFFD. The
        space that SentencePiece puts before a text stays.

        Raises:
            TypeError: tokens that are not integers.
            ValueError: a token outside of the vocabulary.
        """
    def token_text(self, token: int) -> str:
        """How the vocabulary spells a token."""
    def is_control(self, token: int) -> bool:
        """Whether it is a control token, which has no text."""
    def is_end(self, token: int) -> bool:
        """Whether the token ends a text."""
    end_tokens: NDArray[np.int32]
    """The tokens that end a text, int32[n]."""
    adds_bos: bool
    """Whether texts begin with `bos`."""
    bos: int
    """The token that begins texts, or -1."""
    eos: int
    """The token that ends texts, or -1."""
    suppressed: list[int]
    """Tokens that the file says are never to be chosen."""
    mask_token: int
    """The mask token of a parallel draft model (PARD), or -1."""
    infill_tokens: dict[str, int]
    """Its fill-in-the-middle tokens, by "prefix", "suffix", "middle", "repository" and "file"."""
    def shared_with(self, other: Tokenizer) -> NDArray[np.bool_]:
        """Whether the other vocabulary has the same token (bytes, spelling, role) under the same id, for each token of
        this one, bool[num_tokens]."""
    fingerprint: str
    """A hash of the vocabulary, equal for equal tokens."""

class _Sizes:
    """What a model says of each of its sessions, too."""

    vocab_size: int
    weight_bytes: int
    """Bytes of weights that one pass reads."""
    cell_bytes: int
    """Bytes of the KV cache for each token of a context."""
    windowed_cell_bytes: int
    """Those of them in layers with a sliding window, which keep only the last tokens."""
    most_pending: int
    """Most pending rows of a session; limited in models with recurrent layers."""
    state_bytes: int
    """Most bytes of recurrent layers in a context of any length, without kept states."""
    kept_state_bytes: int
    """Bytes of each earlier state that recurrent layers keep, to go back to."""

class Model(_Sizes):
    """Weights of a GGUF file, repacked for the kernel or on ggml's devices; shared by any number of sessions.

    Args:
        path: GGUF file.
        kernel: a name from kernels(), "" for the best.
        num_threads: 0 for as many as choose_cores() says.
        device: "cpu" for our kernels; else the devices that hold layers, by ggml's operations: "ggml-cpu", "metal",
            "gpu", names of ggml's registry, or "rpc:HOST:PORT,HOST:PORT", for which ggml ends the process when a server
            fails.
        progress: called now and then while tensors are loaded.
        kv: how sessions store keys and values, "f16" or "q8_0", which takes half the memory; devices have f16 alone.
        packed: path for save_packed; if the file there has this model's packed weights, they are mapped.
        target: the target, for a draft that reads its hidden states; a draft without embedding or head uses the
            target's. If both have one file, the MTP layer in it is loaded.
        other_pairs, other_feedback: see Form in pystaged.loading.features.

    Raises:
        DeviceError: no such device, or too little memory on it.
        ModelError: the file is damaged, incomplete, or of an architecture or a type that is not supported.
        ValueError: unknown kernel or number of threads.
    """

    def __init__(
        self,
        path: _Path,
        kernel: str = "",
        num_threads: int = 0,
        device: str = "cpu",
        progress: Callable[[], None] | None = None,
        kv: str = "f16",
        packed: _Path = "",
        target: Model | None = None,
        other_pairs: bool = False,
        other_feedback: bool = False,
    ) -> None: ...
    def save_packed(self, path: _Path) -> None:
        """Write the packed weights into a file that exists.

        Raises:
            KeyboardInterrupt: Ctrl-C; the file is of no use.
            ModelError: it cannot be written; the disk may be full.
            RuntimeError: the model was loaded without `packed`, or from that file.
        """
    is_mapped: bool
    """Whether its weights are mapped from a file of packed weights."""
    packed_problem: str
    """Why the file of packed weights was not used; "" if it was, or there was none."""
    def cut_head(self, rows: int) -> None:
        """Compute only the first `rows` logits in a draft that uses its target's head. No effect if the draft has its
        own head, or fewer rows.

        Raises:
            ValueError: the model has sessions, or `rows` is below 1.
        """
    matrix_bytes: int
    """Bytes of the weight matrices in memory."""
    buffer_bytes: int
    """Largest number of further bytes that loading took, without the system's page cache."""
    name: str
    devices: list[str]
    """ggml's names of the devices that hold layers; none for our own kernels."""
    kernel: str
    num_threads: int
    num_few_threads: int
    """Threads of passes of fewer than 16 rows."""
    taps: list[int]
    """The layers after which sessions store hidden states, from 1."""
    def reserve(self, num_cells: int) -> None:
        """Let llama.cpp have room for so many tokens of all sessions together, 0 to 2**30; 0 for twice the first one's.
        Raises ValueError if there are sessions."""
    def tap(self, layers: Sequence[int], all_rows: bool = False, last_row: bool = False) -> None:
        """Let sessions store the hidden states after these layers, ascending from 1: those of rows with logits; with
        `last_row` also of the last row of a prefill; with `all_rows` of every row. Raises ValueError if there are no
        such layers, the model is on a device, or it has sessions."""
    file_bytes: int
    num_weights: int
    """Multiply-adds of one row of a pass, without attention."""
    weight_types: dict[str, int]
    """Bytes of matrices in the file by ggml's type name, descending."""
    max_context: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values, each shared by num_heads / num_kv_heads heads of queries."""
    head_dim: int
    ffn_width: int
    kv: str
    """Type of the sessions' KV cache: "f16" or "q8_0"."""
    is_chained: bool
    """Whether the rows of a pass must be a chain, as with recurrent layers on devices."""
    target_layers: list[int]
    """Layers of the target after which a draft reads hidden states, from 1; empty for other models."""
    borrows_cells: bool
    """Whether it is a draft that attends to the target's KV cache and has none of its own."""
    head_tokens: NDArray[np.int32]
    """The token of each row of the output head, int32[n]; empty if it is the row's number."""
    block_size: int
    """Tokens of a block of DFlash or DSpark, the root included; 0 for other models."""
    is_anchored: bool
    """Whether row i of a block predicts the token after it; if not, row i > 0 predicts its own token."""
    has_markov: bool
    """Whether the predictions of a block's rows also depend on the token before; see Session.likeliest."""
    mask_token: int
    """The token of all rows of a block but the first."""
    architecture: str
    """The file's architecture, such as "qwen3"."""

class HiddenRows:
    """Hidden states of rows, which another model's pass may read; they never leave the extension's memory."""

    width: int
    """Numbers per row."""
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice) -> HiddenRows: ...
    def __add__(self, other: HiddenRows) -> HiddenRows:
        """The rows of both, in order. Raises ValueError if they are of different models."""
    def copy(self) -> HiddenRows:
        """A copy in its own memory: rows of one pass share memory, and each keeps all of it alive."""
    def numpy(self) -> NDArray[np.float32]:
        """A copy, float32[n, width]."""

class RecycledCandidates:
    """The target's likeliest next tokens after each token and each pair of tokens, with their probabilities; shared by
    all texts of a model.

    Each row of a verified tree, rejected ones included, has the target's prediction after it, from which later trees
    are drafted ("Turning Trash into Treasure", Luo et al. 2024, arXiv 2408.08696).

    Args:
        slots: number of pairs, a power of two; there is room for half as many tokens. The default takes 13 MB at once.

    Raises:
        ValueError: slots is not a power of two from 2 to 2**30.
    """

    num_candidates: int
    """Candidates stored for each token and pair; `learn` takes at most so many for each row."""

    def __init__(self, slots: int = 1 << 16) -> None: ...
    num_learnt: int
    """Rows learnt so far."""
    def learn(
        self,
        before: NDArray[np.int32],
        tokens: NDArray[np.int32],
        candidates: NDArray[np.int32],
        logits: NDArray[np.float32],
    ) -> None:
        """Learn from verified rows. Of rows of one call that share a slot only the first counts, the nearest to the
        root. It is blended into an entry of the same tokens and replaces one of other tokens.

        Args:
            before: int32[n], the token before each row's, -1 for none.
            tokens: int32[n], each row's own.
            candidates: int32[n, k], the tokens of the largest logits after each row, best first; k is at most
                num_candidates.
            logits: float32[n, k], those logits.

        Raises:
            ValueError: wrong shapes, or tokens out of range.
        """
    def chances(self, before: int, token: int) -> tuple[dict[int, float], int]:
        """The probability of each candidate after two tokens (`before` is -1 for none), and how many of the two tokens
        it depends on; without candidates, 0."""
    def copy_from(self, other: RecycledCandidates) -> None:
        """Replace the content by a copy of another one's."""
    def entries(self) -> NDArray[np.void]:
        """All entries, those of tokens first, with fields: key int64, tokens int32[num_candidates], -1 for none, and
        their probabilities, chances float32[num_candidates]."""
    def restore(self, entries: NDArray[np.void]) -> None:
        """Add what `entries` returned. Raises ValueError, and adds nothing, for negative keys or probabilities, or
        entries without candidates."""

class Session(_Sizes):
    """The context of one text, in which run() evaluates rows.

    The context holds the committed tokens, and after them the pending rows of the current tree, numbered from 0. A call
    that fails or is interrupted changes neither. Calls of one session wait for each other; passes of a model's sessions
    run in the order of their calls.

    Args:
        model: may be shared by sessions.
        n_ctx: positions; 0 for as many as the model was trained for, but at most 8192.
        target: the target's session, for a draft that attends to the target's KV cache (Model.borrows_cells). Such a
            draft's rows attend to the target's committed tokens, not to each other, and are never committed.

    Raises:
        DeviceError: llama.cpp has no room for another text.
        ValueError: n_ctx is out of range; the target's session is missing, closed, empty or of another model. Every
            method: the session is closed; rows, parents, tokens, lengths or numbers are out of range, such as lengths
            beyond the committed tokens.
        TypeError: tokens, parents or rows are not integers.
        RuntimeError: every method, if called by a signal handler during another call, or in a child of a fork() during
            a call.
    """

    def __init__(self, model: Model, n_ctx: int = 0, target: Session | None = None) -> None: ...
    def likeliest(self, rows: _Ints, before: _Ints, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k likeliest next tokens after pending rows of a draft that reads hidden states, best first: rows of the
        draft's output head, int32[rows, k], and their natural log-probabilities, float32[rows, k].

        Args:
            before: int[rows], the token before each; empty for a draft without a Markov head.

        Raises:
            ValueError: a row without logits, or `before` of another length.
            ModelError: a result is not finite.
        """
    def follow(self, sampling: Sampling, root: int = 0) -> tuple[Any, ...]:
        """Find the accepted path: from row `root` on, while a child of the row holds the model's own token.

        Returns:
            path: int32[m], the accepted rows, root first; tokens: int32[m], the model's own token after each, of which
            the last is the bonus token. If the sampling asks for log-probabilities, also a tuple: those of these
            tokens, float32[m]; the likeliest tokens at each position, int32[m, k], best first; and theirs,
            float32[m, k]. They are natural, from unchanged logits at temperature 1.
        """
    def commit(self, path: _Ints) -> None:
        """Commit these pending rows, a path that begins after the committed tokens, and drop the others."""
    def discard(self) -> None:
        """Drop the pending rows."""
    def keep_states(self, lengths: _Ints, most: int, anchor: int = -1) -> None:
        """Ask recurrent layers to keep their states after these numbers of tokens, so that the text can be rewound to
        them. Replaces earlier requests, but not states already kept. Does nothing for other models.

        Args:
            most: most states to keep; beyond that, those are dropped whose loss costs the least prefill.
            anchor: number of tokens whose state is dropped last.
        """
    def reachable(self, length: int) -> int:
        """The largest number of tokens, at most `length`, that the text can be rewound to.

        Layers with a sliding window can be rewound by 256 tokens from the text's end and from the end of its last
        prefill, or to 0. Recurrent layers can be rewound to the tokens of the last pass if it verified a tree, to kept
        states, or to 0. Other layers can be rewound to any length.
        """
    def rewind(self, length: int) -> int:
        """Keep the first reachable(length) committed tokens, and drop the others and all pending rows. Returns how many
        are kept."""
    def fork(self, length: int) -> Session:
        """A session with as many positions and a copy of the first reachable(length) committed tokens; nothing is
        computed. Raises DeviceError if llama.cpp has no room for another text."""
    def stretch(self, length: int) -> None:
        """Fill the context to `length` tokens without computing them, to time passes: later results mean nothing until
        rewind(0).

        Raises:
            ValueError: nothing is committed, rows are pending, or `length` is less than the committed tokens or above
                n_ctx.
        """
    def close(self) -> None:
        """Free the context."""
    def logits(self, row: int) -> NDArray[np.float32]:
        """A copy of one row's logits, float32[vocab_size]; for tests and inspection."""
    tokens: NDArray[np.int32]
    """The committed tokens, int32[n]."""
    hidden: HiddenRows
    """Hidden states after the layers of Model.tap, [n, taps * width], of the rows that the last call committed: all
    after `verify`, or with all_rows; the last row of a prefill with last_row; else none."""
    def hidden_of(self, rows: _Ints) -> HiddenRows:
        """The same of pending rows. Raises ValueError for rows without stored states."""
    num_bytes: int
    """Bytes of the KV cache of the committed tokens."""
    num_pending: int
    closed: bool
    n_ctx: int
    on_device: bool
    """Whether its passes run on one of ggml's devices, not on this process's threads."""
    most_windowed: int
    """Most tokens in the KV cache of a layer with a sliding window."""

class Work:
    """A text's request for a pass, made by run(). Its static methods check k and the types of tokens (TypeError,
    ValueError); run() checks all else. Tokens, parents and rows are int[n]; a parent is an earlier pending row, or -1
    for the last committed token.

    hidden: for each token another model's hidden states, if the session's model reads them.
    masks: tokens allowed after each judged row, uint32[rows, words], a bit for each token, lowest bit first; tokens
        beyond the last word are forbidden. Forbidden tokens are excluded before all else.
    """

    @staticmethod
    def read(session: Session, tokens: _Ints, hidden: HiddenRows | None = None) -> Work:
        """Evaluate and commit tokens, without logits; the result is None."""
    @staticmethod
    def embed(session: Session, tokens: _Ints) -> Work:
        """As read; the result is each token's hidden state after the last norm, float32[n, width]."""
    @staticmethod
    def verify(
        session: Session,
        tokens: _Ints,
        parents: _Ints,
        sampling: Sampling,
        num_candidates: int = 0,
        masks: NDArray[np.uint32] | None = None,
    ) -> Work:
        """One step: evaluate a tree of n rows whose root is row 0, find its accepted path and commit it. It needs a
        session without pending rows, and leaves none.

        The result is that of Session.follow. If k = num_candidates is above 0, also the tokens of each row's k largest
        logits, int32[n, k], best first, the lower id first if equal; and these logits, float32[n, k].
        """
    @staticmethod
    def propose(
        session: Session,
        tokens: _Ints,
        parents: _Ints,
        num_judged: int,
        k: int,
        sampling: Sampling | Sequence[Sampling],
        masks: NDArray[np.uint32] | None = None,
        hidden: HiddenRows | None = None,
    ) -> Work:
        """Append pending rows, of which the last num_judged get logits. The result is that of rank for these rows; k
        may be 0."""
    @staticmethod
    def rank(
        session: Session,
        rows: _Ints,
        k: int,
        sampling: Sampling | Sequence[Sampling],
        masks: NDArray[np.uint32] | None = None,
    ) -> Work:
        """Evaluate nothing. The result is the k likeliest next tokens after pending rows, best first, int32[rows, k],
        and their scores, float32[rows, k].

        A score is the natural log p plus the noise of sampling; without noise if the sampling is greedy. If filters or
        masks leave fewer than k tokens, the rest are -1 with the score -inf.

        Args:
            sampling: one for all rows, or one for each.
        """
    session: Session
    num_rows: int
    """Number of rows that it adds to a pass."""

def write_texts(path: _Path, head: bytes, sessions: Sequence[Session]) -> None:
    """Write texts, with their keys, values and recurrent states, into a file that exists.

    Args:
        head: identifies the models; the file begins with it.

    Raises:
        ModelError: the file cannot be written.
        ValueError: a session has pending rows, is closed, or is on a device.
    """

def read_texts(path: _Path, head: bytes, sessions: Sequence[Session]) -> None:
    """Read a file of write_texts into empty sessions of the same models, in the same order.

    Raises:
        ModelError: the file cannot be read, is damaged, or has another head; the sessions are empty then.
        ValueError: a session is not empty, is closed, or is on a device.
    """

def run(works: Sequence[Work]) -> list[Any]:
    """Do works of several texts in one pass, or in several if they have more rows than a pass takes.

    Each row has the same bits as in a pass of its own. By llama.cpp texts share a pass, too, but rows may round
    differently. If one work fails, or is interrupted, no session changes.

    Returns:
        The works' results, in order.

    Raises:
        ContextFullError: a row lies beyond the context, or the tree is too large for its spare cells.
        DeviceError: llama.cpp failed, or its context is full.
        ModelError: logits that are needed are not finite.
        KeyboardInterrupt: Ctrl-C during a read.
        TypeError: an item is not a Work.
        ValueError: two works of one session, or of different models; more than most_pending rows would be pending; rows
            are pending where none may be; a mask allows no token; as Session's methods.
    """
