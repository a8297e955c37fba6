"""The compiled engine. Every method that computes releases the GIL; sessions may be used from several threads."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

_Ints = Sequence[int] | NDArray[np.integer]

class ModelError(OSError):
    """A model file that is missing, damaged, or of a kind this engine does not run."""

class DeviceError(OSError):
    """A device that is missing, has too little memory, or failed in a pass."""

class ContextFullError(ValueError):
    """No position is left in the context for the tokens asked for."""

def kernels() -> list[str]:
    """Kernels this CPU can run, best first."""

def metadata(path: str | bytes | PathLike[str] | PathLike[bytes]) -> dict[str, str]:
    """Single values of a GGUF file's metadata, as text. Raises ModelError."""

def physical_cores() -> int:
    """Physical cores this process may keep busy: those it may run on, no more than cpu_quota()."""

def cpu_quota(root: str | bytes | PathLike[str] | PathLike[bytes] = "") -> int:
    """CPUs that control groups grant this process, rounded up; 0 where they set no limit.

    Args:
        root: where proc and sys lie, for tests.
    """

def devices() -> list[tuple[str, str, bool, int, int]]:
    """ggml's devices here: name, description, whether a GPU, bytes of memory free and in all."""

def file_identity(path: str | bytes | PathLike[str] | PathLike[bytes]) -> int:
    """A number for a GGUF file: of its metadata, sizes and times of change, and the first weights of each tensor.
    Raises ModelError as Model."""

def quantize(
    source: str | bytes | PathLike[str] | PathLike[bytes],
    out: str | bytes | PathLike[str] | PathLike[bytes],
    file_type: int,
    allow_requantize: bool,
    dry_run: bool,
) -> bool:
    """Write a GGUF file in another type with libllama's quantizer, which logs to standard error.

    Args:
        file_type: llama.cpp's number of the type. dry_run: only log the sizes of the tensors, and write no file.

    Returns:
        Whether it succeeded; the log says why not.
    """

def rpc_version() -> tuple[int, int]:
    """Major and minor version of the RPC protocol spoken here.

    Raises:
        DeviceError: the installed llama-cpp-python is built without RPC.
    """

def serve_devices(endpoint: str, device: str, num_threads: int) -> None:
    """Lend a device of this machine to others over ggml's RPC, until the process ends.

    Raises:
        DeviceError: no such device, no RPC in the installed llama-cpp-python, or the port is taken.
    """

@overload
def gumbel(seed: int, position: int, token: int) -> float: ...
@overload
def gumbel(seed: int, position: int, token: NDArray[np.int32]) -> NDArray[np.float32]:
    """The noise shared by every model for tokens at a position (Philox4x32-10, Salmon et al. 2011)."""

def rotation(position: int, dims: int, base: float = 10000.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines of the rotary angles at a position, float32[dims / 2] each; for tests."""

def multiply(
    type: str, weights: bytes, rows: int, x: NDArray[np.float32], kernel: str = "", num_threads: int = 1
) -> NDArray[np.float32]:
    """W x by one kernel, for tests: weights in ggml's `type` ("q8_0"), x float32[n, cols]; float32[n, rows].

    Raises:
        ValueError: unknown type or kernel, or sizes that do not match.
    """

def read_bandwidth(num_bytes: int, num_threads: int) -> float:
    """Bytes per second at which this many threads read memory, the median of several rounds."""

def dot_rate(kernel: str, num_threads: int) -> float:
    """Multiply-adds of int8 per second by this many threads of a kernel ("" for the best) that read nothing, the best
    of several rounds."""

class LogitRules:
    """What is done to logits before they are filtered; SamplingConfig says what the fields mean. Raises ValueError
    naming one that is out of range.

    Args:
        logit_bias: by token. end_tokens: tokens excluded while a text has fewer than `min_length` tokens.
        dry_breakers: sequences of tokens that no repetition goes beyond.
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
    """How the target's token is chosen. Raises ValueError naming a field that is out of range.

    Args:
        logprobs: of how many of the likeliest tokens verifying tells log-probabilities, beside that of the chosen one;
            -1 for none at all.
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
    """The vocabulary of a GGUF file, by libllama's own code. Raises ModelError when there is none that is usable."""

    def __init__(self, path: str | bytes | PathLike[str] | PathLike[bytes]) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def metadata(self) -> dict[str, str]:
        """Single values of the file's metadata when it was read, as text."""
    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> NDArray[np.int32]:
        """Token ids of a text.

        Args:
            text: any.
            add_special: put before and behind it what the vocabulary puts there (BOS, EOS).
            parse_special: recognize control tokens written out in it; those that users defined always are.

        Raises:
            UnicodeEncodeError: the text cannot be written as UTF-8.
            ValueError: the vocabulary has no tokens for a character of it, or it has more than 2**20 bytes in a row
                without white space, or of it.
        """
    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for, possibly part of a character; empty for control tokens unless `special`."""
    def decode(self, tokens: _Ints, special: bool = False) -> str:
        """The text of tokens, without control tokens unless `special`. Bytes that are no UTF-8 become U+FFFD; the space
        that SentencePiece puts before a text stays.

        Raises:
            TypeError: no integers. ValueError: a token outside of the vocabulary.
        """
    def sequences_of(self, text: str) -> list[list[int]]:
        """The sequences of tokens that a text may begin in: each token that holds it, alone, and each that ends with
        its beginning, with the tokens of the rest.

        Raises:
            ValueError: an empty text.
        """
    def token_text(self, token: int) -> str:
        """How the vocabulary spells a token."""
    def is_control(self, token: int) -> bool:
        """Whether the token steers the model and is no text."""
    def is_end(self, token: int) -> bool:
        """Whether the token ends a text."""
    @property
    def end_tokens(self) -> NDArray[np.int32]:
        """The tokens that end a text, int32[n]."""
    @property
    def adds_bos(self) -> bool:
        """Whether texts begin with `bos`."""
    @property
    def adds_eos(self) -> bool:
        """Whether texts end with `eos`."""
    @property
    def bos(self) -> int:
        """The token that begins texts, or -1."""
    @property
    def eos(self) -> int:
        """The token that ends texts, or -1."""
    @property
    def mask_token(self) -> int:
        """The mask token of a parallel draft model (PARD), or -1."""
    @property
    def infill_tokens(self) -> dict[str, int]:
        """The tokens for filling in the middle that it has, of "prefix", "suffix", "middle", "repository", "file"."""
    def shared_with(self, other: Tokenizer) -> NDArray[np.bool_]:
        """For each token of this vocabulary whether the other one has it under the same id, with equal bytes, spelling
        and role, bool[num_tokens]."""
    @property
    def fingerprint(self) -> str:
        """Names the vocabulary: equal for equal tokens."""

class Model:
    """Weights of a GGUF file, repacked for the kernel or on ggml's devices; shared by any number of sessions.

    Args:
        path: GGUF file.
        kernel: a name from kernels(), "" for the best.
        num_threads: 0 for one per physical core.
        device: "cpu" for our kernels; else the devices that hold layers, by ggml's operations: "ggml-cpu", "metal",
            "gpu", names of ggml's registry, or "rpc:HOST:PORT,HOST:PORT", for which ggml ends the process when a server
            fails.
        progress: called after each tensor that was brought to a device.
        kv: how sessions store keys and values, "f16" or "q8_0", which takes half the memory; devices have f16 alone.
        packed: file of packed weights (see save_packed), mapped instead of packing if they are this model's; or where
            one will be.
        lender: the target of a draft that reads its target's hidden states; the draft borrows its embedding and head
            where it has none. Of a model's own file, the MTP layer is then loaded.
        other_pairs, other_feedback: see Form in pystaged.loading.features.

    Raises:
        DeviceError: no such device, or too little memory on it.
        ModelError: the file is damaged, incomplete, or of an architecture or a type that is not supported.
        ValueError: unknown kernel or number of threads.
    """

    def __init__(
        self,
        path: str | bytes | PathLike[str] | PathLike[bytes],
        kernel: str = "",
        num_threads: int = 0,
        device: str = "cpu",
        progress: Callable[[], None] | None = None,
        kv: str = "f16",
        packed: str | bytes | PathLike[str] | PathLike[bytes] = "",
        lender: Model | None = None,
        other_pairs: bool = False,
        other_feedback: bool = False,
    ) -> None: ...
    def save_packed(self, path: str | bytes | PathLike[str] | PathLike[bytes]) -> None:
        """Write the packed weights into a file that exists.

        Raises:
            KeyboardInterrupt: Ctrl-C; the file is of no use.
            ModelError: it cannot be written, perhaps for want of room.
            RuntimeError: the model was loaded without `packed`, or from there.
        """
    @property
    def is_mapped(self) -> bool:
        """Whether its weights are mapped from a file of packed ones."""
    @property
    def packed_problem(self) -> str:
        """Why the file of packed weights was not used; "" where it was, or where there was none."""
    def cut_head(self, rows: int) -> None:
        """From now on a draft that borrows its target's head has logits of the first `rows` tokens alone. Nothing
        changes if it has a head of its own, or fewer rows.

        Raises:
            ValueError: there are sessions of it, or `rows` is below 1.
        """
    @property
    def matrix_bytes(self) -> int:
        """Bytes that the weights' matrices take in memory."""
    @property
    def buffer_bytes(self) -> int:
        """What loading them took besides at most, the system's cache aside."""
    @property
    def name(self) -> str: ...
    @property
    def devices(self) -> list[str]:
        """ggml's names of the devices that hold layers; none for our own kernels."""
    @property
    def kernel(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def taps(self) -> list[int]:
        """The layers behind which sessions hand out hidden states."""
    def tap(self, layers: Sequence[int], all_rows: bool = False, last_row: bool = False) -> None:
        """From now on sessions hand out the hidden states behind these layers, which rise from 1 on: of the rows that
        are judged, with `last_row` also of the last row of a reading; or of all, those of prompts too. Raises
        ValueError where there are no such layers, where they are on devices, and where there are sessions."""
    @property
    def file_bytes(self) -> int: ...
    @property
    def experts_per_row(self) -> int:
        """Of a mixture, the experts that a row uses, over all layers; else 0."""
    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
    @property
    def num_weights(self) -> int:
        """Multiply-adds of one row of a pass, attention aside."""
    @property
    def weight_types(self) -> dict[str, int]:
        """Bytes of matrices in the file by ggml's names of their types, the most first."""
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values, each shared by num_heads / num_kv_heads heads of queries."""
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_width(self) -> int: ...
    @property
    def kv(self) -> str:
        """How sessions store keys and values."""
    @property
    def cell_bytes(self) -> int:
        """Bytes of keys and values that one token of a context takes."""
    @property
    def windowed_cell_bytes(self) -> int:
        """Those of them that are in layers with a window, which do not keep them of all tokens."""
    @property
    def most_pending(self) -> int:
        """Pending rows that a session may have; of a model with recurrent layers not any number."""
    @property
    def is_chained(self) -> bool:
        """Whether rows that are evaluated together must be a chain, as with recurrent layers on devices."""
    @property
    def state_bytes(self) -> int:
        """Most bytes that recurrent layers take for a context of any length, without kept states."""
    @property
    def kept_state_bytes(self) -> int:
        """Bytes of each earlier state that recurrent layers keep, to go back to."""
    @property
    def target_layers(self) -> list[int]:
        """Of a draft that reads its target's hidden states: the layers behind which it does so, 1 for the first."""
    @property
    def borrows_cells(self) -> bool:
        """Whether it is a draft that attends to keys and values of its target's text and has none of its own."""
    @property
    def head_tokens(self) -> NDArray[np.int32]:
        """The token of each row of the head, int32[n]; empty where that is the row's number."""
    @property
    def block_size(self) -> int:
        """Tokens of a block that the draft evaluates at once, the root included; 0 for any other model."""
    @property
    def is_anchored(self) -> bool:
        """Whether row i of a block predicts the token after it; else the token in its own place, and row 0 nothing."""
    @property
    def has_markov(self) -> bool:
        """Whether what follows a row of a block also depends on the token before; see Session.likeliest."""
    @property
    def mask_token(self) -> int:
        """The token of a block's rows but the first."""
    @property
    def architecture(self) -> str:
        """The family, as the file names it: "llama", "qwen3", ..."""

class HiddenRows:
    """Hidden states of rows, which another model's pass may read; they never leave the extension's memory."""

    @property
    def width(self) -> int:
        """Numbers of a row."""
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice) -> HiddenRows: ...
    def __add__(self, other: HiddenRows) -> HiddenRows:
        """The rows of both, in order. Raises ValueError where they are of different models."""
    def copy(self) -> HiddenRows:
        """The same in memory of their own: rows of one pass share theirs, and each keeps all of it."""
    def numpy(self) -> NDArray[np.float32]:
        """A copy, float32[n, width]."""

class RecycledCandidates:
    """The target's likeliest next tokens after a token and after a pair, with chances; one for all texts of a model,
    which take turns.

    Every row of a verified tree says what the target would go on with, the rejected ones too; "Turning Trash into
    Treasure" (Luo et al. 2024, arXiv 2408.08696) drafts from that.

    Args:
        slots: for pairs, a power of two; half as many for tokens. As many as by default take 13 MB, all at once.

    Raises:
        ValueError: slots is no power of two from 2 to 2**30.
    """

    num_candidates: int
    """Kept of a token or a pair: what each row should be asked for."""

    def __init__(self, slots: int = 1 << 16) -> None: ...
    @property
    def num_learnt(self) -> int:
        """Rows learnt so far."""
    def learn(
        self,
        before: NDArray[np.int32],
        tokens: NDArray[np.int32],
        candidates: NDArray[np.int32],
        logits: NDArray[np.float32],
    ) -> None:
        """Take in verified rows. Of those of one call with the same slot the first has it, because it is the nearest to
        the root; of two calls the newer one.

        Args:
            before: int32[n], the token before each row's, -1 for none; tokens: int32[n], each row's own.
            candidates: int32[n, k], the tokens of the largest logits after each row, best first, k at most
                num_candidates; logits: float32[n, k], natural log up to a constant of the row.

        Raises:
            ValueError: shapes or tokens that cannot be.
        """
    def chances(self, before: int, token: int) -> tuple[dict[int, float], int]:
        """The probability of each candidate after these two tokens (`before` is -1 for none), 0 candidates if nothing
        is known; and after how many tokens it is known."""
    def copy_from(self, other: RecycledCandidates) -> None:
        """Know what another one knows, and no more."""
    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """All that is known: keys int64[n], candidates int32[n, num_candidates], -1 for none, and their chances
        float32[n, num_candidates]; those of tokens first."""
    def restore(self, keys: NDArray[np.int64], candidates: NDArray[np.int32], chances: NDArray[np.float32]) -> None:
        """Take in what `entries` gave. Raises ValueError, and takes in nothing, for negative keys or chances or no
        candidates."""

class DraftHead:
    """A draft head: a small recurrent network that goes on from a target's hidden state, a token at a time (ReDrafter,
    Cheng et al. 2024, arXiv 2403.09919).

    Args:
        path: GGUF file of architecture "draft-head".
        kernel: as in Model.

    Raises:
        ModelError: the file is missing, damaged or no draft head.
    """

    def __init__(self, path: str | bytes | PathLike[str] | PathLike[bytes], kernel: str = "") -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def taps(self) -> list[int]:
        """The layers of the target behind which it reads hidden states, 1 for the first."""
    @property
    def width(self) -> int:
        """Numbers of a state; of the target's hidden states it reads the first so many."""
    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens it can propose, int32[n], rising."""
    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
    def check(self, target: Model) -> None:
        """Refuse a target that it cannot read. Raises ValueError."""
    def begin(self, target: Model, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """The state before a text's next root, float32[width], from the target's hidden states of the last committed
        row, float32[taps, target's width]."""
    def step(
        self, target: Model, states: NDArray[np.float32], tokens: _Ints, k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """Take in tokens, int[n], each after a state of its own, float32[n, width]; k may be 0.

        Returns:
            The states behind them, float32[n, width]; the k likeliest next tokens of each, int32[n, k], best first; and
            their log-probabilities among the head's tokens, float32[n, k].

        Raises:
            ValueError: the target is none for this head, or a shape, a token or k is out of range.
            ModelError: what comes of the head's weights is not finite.
        """

class Session:
    """A model with its context: evaluates trees of tokens, judges which path stands, keeps that path.

    The context is the committed tokens; behind them lie the pending rows of the tree in hand, numbered from 0. A call
    that fails or is interrupted leaves both as they were. Calls of one session wait for each other; passes of a model's
    sessions take turns, in the order they were asked for.

    Args:
        model: shared.
        n_ctx: positions, 0 for as many as the model was trained for, but no more than 8192.
        target: the session of a draft's target, needed where the draft borrows its keys and values, else unused. Rows
            see its committed tokens and not each other, at the position behind these; they are never committed.

    Raises:
        ValueError: n_ctx out of range; a target's session that is missing, closed, empty or of another model; a closed
            session (every method); rows, parents, tokens or lengths out of range.
        TypeError: tokens, parents or rows that are not integers.
        RuntimeError: every method, called by a signal handler in the middle of another one, or in a child of fork()
            that the parent made in the middle of one.
    """

    def __init__(self, model: Model, n_ctx: int = 0, target: Session | None = None) -> None: ...
    def prefill(self, tokens: _Ints) -> None:
        """Evaluate and commit tokens: int[n]. Computes no logits.

        Raises:
            ContextFullError: more tokens than positions.
            KeyboardInterrupt: Ctrl-C, between layers; nothing is committed.
        """
    def evaluate(self, tokens: _Ints, parents: _Ints, num_logits: int | None = None) -> None:
        """Append pending rows: int[n] tokens and int[n] parents, each an earlier row or -1 for the committed end.

        Only the last num_logits rows (default: all) can be judged afterwards.

        Raises:
            ContextFullError: a row lies beyond the context, or the tree is too large for its spare cells.
            ValueError: more than 512 rows would be pending of a model with recurrent layers.
        """
    def candidates(
        self,
        rows: _Ints,
        k: int,
        sampling: Sampling | Sequence[Sampling],
        masks: NDArray[np.uint32] | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k likeliest next tokens after rows, best first: int32[rows, k] and scores float32[rows, k].

        One sampling for all rows, or one for each. masks: uint32[rows, words], a bit for each token that may follow a
        row, the first in the lowest; tokens beyond the last word may not. All else is as if the others were not there.

        A score is log p plus the shared noise, log p alone when greedy (natural log). Where filters or masks leave
        fewer than k tokens the rest are -1 with score -inf.
        """
    def likeliest(self, rows: _Ints, before: _Ints, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Of a draft that reads its target's hidden states: the k likeliest next tokens after pending rows, best first,
        as rows of the draft's head, int32[rows, k]; and their log-probabilities, float32[rows, k] (natural log).

        Args:
            before: int[rows], the token before each; empty where the draft has no Markov head.

        Raises:
            ValueError: rows that were not judged, or `before` of another length.
            ModelError: what comes of the draft's weights is not finite.
        """
    def follow(self, sampling: Sampling, root: int = 0) -> tuple[Any, ...]:
        """Walk from row `root` while the model's own token is among a row's children.

        Returns:
            path: int32[m], the rows walked, root first; tokens: int32[m], the model's token after each, the last of
            which is the bonus token. Where the sampling asks for log-probabilities also a tuple: float32[m], of these
            tokens; int32[m, k], the likeliest tokens at each place, best first; float32[m, k], theirs. They are natural
            ones of the logits as they are, without rules and filters, at temperature 1.
        """
    def verify(
        self,
        tokens: _Ints,
        parents: _Ints,
        sampling: Sampling,
        num_candidates: int = 0,
        masks: NDArray[np.uint32] | None = None,
    ) -> tuple[Any, ...]:
        """One step: evaluate a tree, int32[n] with the root in row 0, follow it from there and commit the path.

        masks: uint32[n, words], as in candidates.

        Returns:
            As follow. Where num_candidates = k is above 0, of each row of the tree also the tokens of its k largest
            logits, int32[n, k], best first, ties by the lower id; and these logits, float32[n, k].

        Raises:
            ContextFullError: as evaluate.
            ValueError: there are pending rows, k is out of range, or a mask allows no token. Whatever fails, the
                committed tokens stay and nothing is left pending.
        """
    def commit(self, path: _Ints) -> None:
        """Keep these pending rows, a path from the committed end on, and drop the rest."""
    def discard(self) -> None:
        """Drop the pending rows."""
    def keep_states(self, lengths: _Ints, most: int, anchor: int = -1) -> None:
        """Keep the states of recurrent layers after these numbers of tokens when the text reaches them, so that it can
        go back there. Replaces earlier requests, but not states already kept. Does nothing for other models.

        most: most states to keep in all; beyond that, those go that save the least reading. anchor: number of tokens
            whose state goes last of all.

        Raises:
            ValueError: most is below 0.
        """
    def reachable(self, length: int) -> int:
        """The longest beginning of the text, of `length` tokens at most, that it can go back to.

        All, but where layers have a window, which do not keep what lies far behind it: then to where the text was read
        to last, from there or from its end by 256 tokens, or to nothing. Where layers are recurrent, to its end, to any
        token of the last pass if it verified a tree, to states that were kept, or to nothing.

        Raises:
            ValueError: fewer tokens are committed.
        """
    def rewind(self, length: int) -> int:
        """Go back to the first `length` committed tokens, or as many of them as are reachable, and drop all else.

        Memory is given back where it is much.

        Returns:
            How many tokens are left; the caller reads the others again.

        Raises:
            ValueError: fewer tokens are committed.
        """
    def fork(self, length: int) -> Session:
        """A session of as many positions that begins with the first `length` committed tokens, or as many of them as
        are reachable; nothing is computed.

        Raises:
            ValueError: fewer tokens are committed.
        """
    def stretch(self, length: int) -> None:
        """Go on as if the context held `length` tokens, all like the last one, without computing them: to time passes.

        What is evaluated behind them takes the time that it would take and means nothing; rewind(0) ends the
        pretence.

        Raises:
            ValueError: nothing is committed, rows are pending, or `length` is less than there is or beyond n_ctx.
        """
    def close(self) -> None:
        """Free the context."""
    def logits(self, row: int) -> NDArray[np.float32]:
        """A copy of one row's logits, float32[vocab_size]; for tests and inspection."""
    @property
    def tokens(self) -> NDArray[np.int32]:
        """The committed tokens, int32[n]."""
    @property
    def hidden(self) -> HiddenRows:
        """What the model taps of the rows that the last call committed, [n, taps * width]: if that was `verify`, or if
        the model taps all rows; of the last row of a reading, if it taps that; else of none."""
    def hidden_of(self, rows: _Ints) -> HiddenRows:
        """The same of pending rows. Raises ValueError for rows of which nothing was kept."""
    @property
    def experts(self) -> tuple[NDArray[np.uint8], int]:
        """Of a mixture, the experts that rows of the last call that evaluated any use, uint8[rows, bytes]: bit
        l * n + e is set for expert e of the l-th layer that has n; the last layer of rows that were only read uses
        none. And how many distinct ones the whole pass used, over all layers and sessions. Else no bytes and 0."""
    @property
    def states(self) -> NDArray[np.float32]:
        """A copy of `hidden`, float32[n, taps, width]."""
    @property
    def num_bytes(self) -> int:
        """Bytes that the keys and values of the committed tokens take."""
    @property
    def num_pending(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def on_device(self) -> bool:
        """Whether its passes run on a device of ggml's, not on this process's threads."""
    @property
    def cell_bytes(self) -> int:
        """Bytes of keys and values that one token takes."""
    @property
    def windowed_cell_bytes(self) -> int:
        """Those of them that are in layers with a window."""
    @property
    def most_windowed(self) -> int:
        """Tokens whose keys and values layers with a window keep at most."""
    @property
    def most_pending(self) -> int:
        """As of its model."""
    @property
    def state_bytes(self) -> int:
        """Most bytes that recurrent layers take for it, without kept states."""
    @property
    def kept_state_bytes(self) -> int:
        """Bytes of each earlier state that recurrent layers keep, to go back to."""
    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
    @property
    def vocab_size(self) -> int: ...

class Work:
    """What one text asks of a pass: to read tokens, or to verify or grow a tree; done by run(). It keeps its session.
    The three methods that make one raise TypeError and ValueError for what is wrong with tokens' types and k; all else
    is checked by run()."""

    @staticmethod
    def read(session: Session, tokens: _Ints, hidden: HiddenRows | None = None) -> Work:
        """Evaluate and commit tokens, int[n], as Session.prefill; the result is None.

        hidden: of each token another model's hidden states, where the session's model reads them.
        """
    @staticmethod
    def embed(session: Session, tokens: _Ints) -> Work:
        """As read; the result is what the head would read of each token, after the last norm: float32[n, width]. On the
        CPU's own kernels alone."""
    @staticmethod
    def verify(
        session: Session,
        tokens: _Ints,
        parents: _Ints,
        sampling: Sampling,
        num_candidates: int = 0,
        masks: NDArray[np.uint32] | None = None,
    ) -> Work:
        """As Session.verify, whose result it has."""
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
        """Append pending rows, as Session.evaluate with num_logits = num_judged, and rank what may follow those judged.

        One sampling for all judged rows, or one for each; hidden as in read; k may be 0. The result is that of
        Session.candidates for the judged rows, int32[num_judged, k] and float32[num_judged, k].
        """
    @property
    def session(self) -> Session: ...
    @property
    def num_rows(self) -> int:
        """Rows that it adds to a pass."""

def write_texts(path: str | bytes | PathLike[str] | PathLike[bytes], head: bytes, sessions: Sequence[Session]) -> None:
    """Write texts, with their keys, values and recurrent states, into a file that exists.

    Args:
        head: says what the texts are of; the file begins with it.

    Raises:
        ModelError: the file cannot be written.
        ValueError: a session has pending rows, is closed, or is on a device.
    """

def read_texts(path: str | bytes | PathLike[str] | PathLike[bytes], head: bytes, sessions: Sequence[Session]) -> None:
    """Read texts from a file of write_texts into new sessions of the same models, in the same order.

    Raises:
        ModelError: the file cannot be read, is damaged, or has another head; the sessions are empty then.
        ValueError: a session is not empty, is closed, or is on a device.
    """

def run(works: Sequence[Work]) -> list[Any]:
    """Do works of several texts in one pass, or in several where their rows are more than a pass takes.

    Every row has the bits that it has alone. On devices each text has passes of its own. All or none: whatever fails,
    every session is left as it was.

    Returns:
        The works' results, in order.

    Raises:
        ContextFullError: as Session.evaluate.
        KeyboardInterrupt: Ctrl-C while tokens are read.
        TypeError: something that is no Work.
        ValueError: two works of one session, or of different models; as Session's methods.
    """
