"""Sampling from a GPT with a key-value cache. Start reading at stream."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from numbers import Integral
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_is_tensor
from kernels.decode import can_overlap
from model.attention import layer_masks, window_of
from model.cache import LayerCache
from model.gpt import GPT
from model.graphs import recording
from model.modes import evaluating
from model.rope import rotation

# float32 ends at 3e38: logits divided by less could be infinite. Long before, the likeliest token has all of
# the probability
LEAST_TEMPERATURE = 1e-30
# the whole that top_p is a share of: finer than float32, and the sum over any vocabulary fits in 63 bits
WHOLE_MASS = 2**40
# in place of a token where the largest logit is not finite
NOT_FINITE = -1
# sizes of decoders for which a step is compiled; with PyTorch's own limit, 8, all others would run eagerly
MOST_COMPILED = 2**16


def generate(model: GPT, tokens: Tensor, n_new: int, **options) -> Tensor:
    """The prompts and up to n_new sampled tokens, (B, T + n) int64; arguments as for `stream`."""
    new = (x[:, None] for x in stream(model, tokens, n_new, **options))
    return torch.cat([tokens.cpu(), *new], dim=1).to(tokens.device)


@torch.no_grad()
def stream(
    model: GPT,
    tokens: Tensor,
    n_new: int,
    *,
    lengths: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    vocab_size: int | None = None,
    stop_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    compiled: bool = False,
) -> Iterator[Tensor]:
    """Yields the next token of each of B sequences, (B,) int64 on the CPU, up to n_new times.

    tokens: prompts (B, T), T >= 1; lengths: (B,) int64, where they end, if some are shorter than T.
    temperature 0, or below LEAST_TEMPERATURE, takes the likeliest token; top_k keeps the k likeliest; top_p
    keeps the smallest set of likeliest tokens that holds probability p (Holtzman et al., arXiv:1904.09751).
    vocab_size: only ids below it are drawn, where the tokenizer has fewer than the model. A sequence that has
    drawn one of stop_tokens repeats it; once all have, the stream ends. compiled: with torch.compile, for
    long outputs on a GPU; another B, or another sum of T and n_new, is compiled anew. The model's mode is
    left as it was found. Raises ValueError if prompts and new tokens exceed the model's positions, and for
    logits of ids that may be drawn that are not finite: any after the prompts, the largest later.
    """
    _check(model, tokens, n_new, temperature, top_k, top_p, vocab_size)
    batch, prompt_len = tokens.shape
    if lengths is not None:
        _check_lengths(lengths, batch, prompt_len)
    with evaluating(model):
        is_greedy = temperature < LEAST_TEMPERATURE
        if is_greedy:
            draw = partial(largest, find=likeliest if compiled else partial(torch.argmax, dim=-1))
        else:
            draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        stops = _integers(stop_tokens)
        has_stops = len(stops) > 0
        stops_there, stopped = stops.to(tokens.device), torch.zeros(batch, dtype=torch.bool, device="cpu")

        def choose(logits: Tensor, newest: Tensor | None) -> Tensor:
            """The next tokens, (B,), from logits (B, V); newest: those before, (B,), None after a prompt."""
            drawn = draw(logits[:, :vocab_size])
            if newest is None or not has_stops:
                return drawn
            # a stopped sequence repeats its stop token; isin may wait for the GPU, which a graph cannot do
            return torch.where((newest[:, None] == stops_there).any(dim=-1), newest, drawn)

        # random numbers in a captured graph would need a generator that is registered with it
        choose_in_step = choose if is_greedy else None
        # made in inference mode, its tensors could not be changed outside, where the caller may read on
        with torch.inference_mode(False), torch.no_grad():
            decoder = Decoder(model, batch, prompt_len + n_new, choose_in_step, compiled=compiled)
        drawn, arrivals = decoder.drawn, Arrivals(decoder.drawn[:n_new])
        is_ahead = False
        for place in range(n_new):
            if place == 0:
                logits = decoder.start(tokens, lengths)
                dtype = logits.dtype
                # the others, which may only pad the vocabulary, are never drawn
                if not bool(logits[:, :vocab_size].isfinite().all()):
                    _refuse_infinite("after the prompt", dtype)
            elif not is_ahead:
                logits = decoder.step()
            if logits is not None:
                drawn[place] = choose(logits, drawn[place - 1] if place else None)
            arrivals.send(place)
            # the GPU goes on while the caller reads this token, unless the next step is yet to be compiled
            is_ahead = decoder.returns_at_once and place + 1 < n_new
            if is_ahead:
                logits = decoder.step()
            new = arrivals.wait(place)
            if bool((new == NOT_FINITE).any()):
                _refuse_infinite(f"after {place} new tokens", dtype)
            yield new
            if has_stops:
                stopped |= torch.isin(new, stops)
                if stopped.all():
                    return


class Arrivals:
    """The rows of a tensor, copied to the CPU while a GPU goes on: no row may change once it is sent.

    The copies run on a stream of their own. It waits for what was launched before a row is sent, and nothing
    launched later waits for it.
    """

    def __init__(self, rows: Tensor):
        self._rows = self._on_cpu = rows
        if rows.is_cuda:
            # page-locked memory is expensive to allocate: all of it at once
            self._on_cpu = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
            self._stream = torch.cuda.Stream(rows.device)
            # the memory of the rows must not be reused while a copy from it is under way
            rows.record_stream(self._stream)

    def send(self, index: int) -> None:
        if self._rows.is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream(self._rows.device))
            with torch.cuda.stream(self._stream):
                self._on_cpu[index].copy_(self._rows[index], non_blocking=True)

    def wait(self, index: int) -> Tensor:
        """The row on the CPU, once it and all rows sent before it have arrived."""
        if self._rows.is_cuda:
            self._stream.synchronize()
        return self._on_cpu[index]


class Decoder:
    """A model, the caches of B sequences of up to `capacity` tokens, and the tokens drawn.

    drawn: (capacity, B) int64, from the first tokens after the prompts on, each row written once, so that it
    can be copied while later steps run. A step reads the newest tokens. Given `choose`, which maps
    (logits (B, V), newest (B,)) -> (B,), it adds the next tokens itself; otherwise the caller does.

    On a GPU the step for one token is captured in a CUDA graph when it runs for the second time: otherwise
    Python would take longer to launch the small kernels than they take to run.
    """

    def __init__(
        self,
        model: GPT,
        batch: int,
        capacity: int,
        choose: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        compiled: bool = False,
    ):
        self.model, self._choose = model, choose
        device = model.token_embedding.weight.device
        # in GPU memory, because a captured graph would repeat the same number counted in Python
        self._counts = torch.zeros(1 + batch, dtype=torch.int64, device=device)
        # rows drawn so far, (1,), and tokens of each sequence, (B,)
        self._n_drawn, self.lengths = self._counts[:1], self._counts[1:]
        self.drawn = torch.zeros(capacity, batch, dtype=torch.int64, device=device)
        self.caches = empty_caches(model, capacity, self.lengths)
        self._turns = None
        if model.config.rotary is not None:
            positions = torch.arange(capacity, device=device)
            self._turns = rotation(model.config.rotary, model.config.head_dim, positions)
        # a function, not a method of this object, which would then hold itself: caches and graph would keep
        # their memory until Python next looks for such cycles
        self._advance = compiled_advance(can_overlap(device)) if compiled else Decoder._eager
        self._has_run = False
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def returns_at_once(self) -> bool:
        """Whether a step only launches work on a GPU, having been compiled before."""
        return self._has_run and self.lengths.is_cuda

    def start(self, prompts: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The logits (B, V) after prompts (B, T), which end at lengths (B,), or at T if not given."""
        self.lengths.copy_(prompts.shape[1] if lengths is None else lengths)
        self._n_drawn.zero_()
        hidden = self.model.hidden_states(prompts, caches=self.caches)
        rows = torch.arange(len(prompts), device=prompts.device)
        return self.model.logits(hidden[rows, self.lengths - 1])

    def step(self) -> Tensor | None:
        """The logits (B, V) after the newest tokens, valid until the next step; None if this step chose."""
        if not self.returns_at_once:
            self._has_run = True
            return self._step()
        if self._graph is None:
            graph, device = torch.cuda.CUDAGraph(), self.lengths.device
            with torch.cuda.device(device), recording(graph, torch.cuda.Stream(device)):
                self._logits = self._step()
            self._graph = graph
        self._graph.replay()
        return self._logits

    def _step(self) -> Tensor | None:
        self._counts += 1
        return self._advance(self, self.lengths, self._n_drawn)

    def _eager(self, lengths: Tensor, n_drawn: Tensor) -> Tensor | None:
        # NOT_FINITE, which the caller is yet to hear of, is no token
        newest = self.drawn[n_drawn - 1][0].clamp(min=0)  # (B,)
        positions = (lengths - 1)[:, None]
        turn = self._turns and tuple(x[positions] for x in self._turns)
        hidden = self.model.hidden_states(newest[:, None], positions=positions, caches=self.caches, turn=turn)
        logits = self.model.logits(hidden[:, 0])
        if self._choose is None:
            return logits
        self.drawn[n_drawn] = self._choose(logits, newest)
        return None


@cache
def compiled_advance(overlaps: bool) -> Callable:
    """Decoder._eager, compiled; one function for all decoders, since PyTorch keeps each that it makes."""
    # with these, Inductor generates one-row products itself, as cuBLAS is far from memory speed; stores
    # values made of more than 4 tensors, which each program of a product would otherwise recompute;
    # combines small kernels; and lets a kernel start while the one before it ends
    tuned = {
        "coordinate_descent_tuning": True,
        "realize_acc_reads_threshold": 4,
        "combo_kernels": True,
        "triton.enable_pdl": overlaps,
    }
    compiled = torch.compile(Decoder._eager, dynamic=False, options=tuned)
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), MOST_COMPILED)

    def advance(*inputs) -> Tensor | None:
        with torch._dynamo.config.patch(limits):
            return compiled(*inputs)

    return advance


def empty_caches(model: GPT, capacity: int, lengths: Tensor) -> list[LayerCache]:
    """One per layer, for `capacity` tokens or, where a layer sees a sliding window, for the window."""
    config, attention, device = model.config, model.attention, lengths.device
    dtype = model.token_embedding.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    masks = [None] * config.n_layer
    if attention.sparse:
        masks = layer_masks(attention, config.n_layer, capacity, device)
    caches = []
    for index, mask in enumerate(masks):
        window = window_of(attention.patterns[index % len(attention.patterns)])
        places, mask = (capacity, mask) if window is None else (min(window, capacity), None)
        shape = (len(lengths), places, config.n_kv_head, config.head_dim)
        caches.append(LayerCache.empty(shape, lengths, mask, dtype))
    return caches


def largest(logits: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
    """What find gives for logits (B, V), the place of each row's largest, (B,), or NOT_FINITE."""
    ids = find(logits)
    is_finite = logits.gather(-1, ids[:, None])[:, 0].isfinite()
    return torch.where(is_finite, ids, NOT_FINITE)


def likeliest(logits: Tensor) -> Tensor:
    """The index of the first largest logit of each row (B, V), (B,): what argmax gives.

    In two steps, because a compiler would have one program search a whole row.
    """
    n_parts = 128
    padding = -logits.shape[-1] % n_parts
    parts = F.pad(logits, (0, padding), value=float("-inf")).unflatten(-1, (n_parts, -1))
    largest, place = parts.max(dim=-1)  # (B, n_parts)
    part = largest.argmax(dim=-1, keepdim=True)
    return (part * parts.shape[-1] + place.gather(-1, part))[:, 0]


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token id per row, (B,), from logits (B, V), at LEAST_TEMPERATURE or above; or NOT_FINITE."""
    logits = logits.float() / temperature
    if top_k is None:
        values, ids = logits.sort(dim=-1, descending=True)
    else:
        values, ids = logits.topk(min(top_k, logits.shape[-1]))
    # the first is the largest, and NaN counts as that
    is_finite = values[:, :1].isfinite()
    # of NaN nothing may be drawn: a GPU would give up all its work
    probabilities = torch.where(is_finite, values, 0.0).softmax(dim=-1)
    if top_p is not None:
        # the mass before a token decides, so the likeliest token always stays. In whole numbers, whose sums
        # do not depend on order: torch refuses a GPU's running sum of floats under deterministic=true
        mass = (probabilities.double() * WHOLE_MASS).long()
        before = mass.cumsum(dim=-1) - mass
        # compared with a float, torch would round all of them to its default dtype, to 11 bits in float16
        probabilities = probabilities.masked_fill(before >= math.ceil(top_p * WHOLE_MASS), 0.0)
    drawn = ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator))
    return torch.where(is_finite, drawn, NOT_FINITE)[:, 0]


def _refuse_infinite(place: str, dtype: torch.dtype) -> NoReturn:
    way_out = "use bf16 or fp32" if dtype == torch.float16 else "use an earlier checkpoint"
    kind = str(dtype).removeprefix("torch.")
    raise ValueError(f"the model's logits {place} are not finite in {kind}: {way_out}")


def _integers(stop_tokens: Sequence[int]) -> Tensor:
    """The ids as a tensor (n,) int64 on the CPU."""
    try:
        ids = torch.as_tensor(stop_tokens, device="cpu")
        # an empty list makes floats
        is_wrong = ids.dim() != 1 or (ids.numel() > 0 and not _holds_integers(ids))
    # a set, a text or None
    except (RuntimeError, TypeError, ValueError):
        is_wrong = True
    if is_wrong:
        raise ValueError(f"stop_tokens must be a sequence of integers, got {stop_tokens!r}: write [ID]")
    return ids.to(torch.int64)


def _holds_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _check_lengths(lengths: Tensor, batch: int, prompt_len: int) -> None:
    check_is_tensor("lengths", lengths)
    if (
        lengths.shape != (batch,)
        or not _holds_integers(lengths)
        or bool(((lengths < 1) | (lengths > prompt_len)).any())
    ):
        raise ValueError(
            f"lengths must be ({batch},) integers, each from 1 to {prompt_len}, got {lengths.tolist()}"
        )


def _check(
    model: GPT,
    tokens: Tensor,
    n_new: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    vocab_size: int | None,
) -> None:
    check_is_tensor("tokens", tokens)
    if tokens.dim() != 2 or not _holds_integers(tokens):
        raise ValueError(f"tokens must be (B, T) integers, got {tokens.dtype} of shape {tuple(tokens.shape)}")
    prompt_len, limit = tokens.shape[1], model.config.max_seq_len
    optional = {"top_k": top_k, "vocab_size": vocab_size}
    given = {name: x for name, x in optional.items() if x is not None}
    for name, x in {"n_new": n_new, **given}.items():
        if isinstance(x, bool) or not isinstance(x, Integral):
            raise ValueError(f"{name} must be an integer, got {x!r}")
    if prompt_len < 1:
        raise ValueError("tokens must hold at least one token a row to start from, got none")
    if n_new < 0:
        raise ValueError(f"n_new must be at least 0, got {n_new}")
    if prompt_len + n_new > limit:
        raise ValueError(
            f"{prompt_len} prompt tokens and n_new={n_new} exceed the model's {limit} positions: "
            f"n_new={max(limit - prompt_len, 0)} fits"
        )
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None for all tokens, got {top_k}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], or None for all tokens, got {top_p}")
    if vocab_size is not None and not 1 <= vocab_size <= model.config.vocab_size:
        raise ValueError(
            f"vocab_size must be from 1 to the model's {model.config.vocab_size}, or None for all, "
            f"got {vocab_size}"
        )
