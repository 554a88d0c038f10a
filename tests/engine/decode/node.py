"""A decode engine without a model: scheduler, event loop, batches, queues, relay, allocator, pools are the tree's own.

What is ours is the model. It has one KV row a token. Its next token is a sum over all rows of the history as they
stand in the pool, so a wrong row changes the text. Its draft is right (three tokens more in a step) as long as all its
own rows and what is relayed to its first step belong to the same history; else nothing drafted is accepted.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.engine.decode.world import World

PAGE = 4
WORDS = 97
DRAFTED = 4  # tokens of a verification
STEP = 1024  # a row holds token * STEP + position
NOISE = -7.0


class _No(int):
    """Zero and false, and so is every part of it and every answer that it gives."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class Settings(SimpleNamespace):
    """Configuration whose unnamed values are false."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _No()


class Ignored:
    """Something that is only told things: every method takes everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Kernel:
    """Stands where the engine launches a kernel on a grid of one program a request."""

    def __init__(self, program: Callable[..., None]) -> None:
        self.program = program

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.program


def _fill(before: Any, after: Any, last: Any, free: Any, out: Any, *sizes: int) -> None:
    """The allocation kernels' rule: fill the last page, then take whole new pages in the order of ``free``."""
    taken = at = 0
    for start, end, slot in zip(before.tolist(), after.tolist(), last.tolist(), strict=True):
        for place in range(start, end):
            fresh = int(free[taken]) if taken < len(free) else 0  # the caller sees that it was too much
            slot = fresh * PAGE if place % PAGE == 0 else slot + 1
            taken += place % PAGE == 0
            out[at] = slot
            at += 1


def _fill_one(after: Any, *rest: Any) -> None:
    _fill(after - 1, after, *rest)


def _assign(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, *sizes: int) -> None:
    at = 0
    for index, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[index, start:end] = slots[at : at + end - start]
        at += end - start


def _gather(indices: Any, *relayed: Any) -> tuple[Any, ...]:
    return tuple(None if buffer is None else buffer[indices] for buffer in relayed)


class Done(Exception):
    """Ends the event loop, which has no end of its own."""


def row(token: int, position: int) -> float:
    return float(token * STEP + position)


def following(rows: Sequence[float]) -> int:
    """The model: the token that follows a history with these KV rows."""
    return int(sum(value * (place % 7 + 1) for place, value in enumerate(rows))) % WORDS


def text(prompt: Sequence[int], new: int) -> list[int]:
    """What the model says without any engine."""
    rows: list[float] = []
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new:
        rows = [*rows, *(row(token, place) for place, token in list(enumerate(tokens))[len(rows) :])]
        tokens.append(following(rows))
    return tokens[len(prompt) :]


@dataclass
class Seen:
    """What happened to one request."""

    request: Any
    prompt: list[int]
    new: int
    steps: int = 0
    poor: int = 0  # steps in which nothing drafted was accepted
    aborted: bool = False
    rows_behind: list[int] = field(default_factory=list)


class Node:
    """One engine; drive it inside ``with world.entered()``.

    Attributes:
        trace: what the loop did, in order.
        requests: everything that ever arrived.
        lost: accepted tokens whose result nobody took.
        relays_seeds: whether the draft-extend of each step gives a seed for the next one.
    """

    def __init__(
        self,
        world: World,
        *,
        speculative: bool,
        pages: int = 24,
        slots: int = 6,
        overlap: bool = True,
        seeds: bool = False,
    ) -> None:
        self.world, self.speculative, self.seeds = world, speculative, seeds
        self.relays_seeds = seeds
        self.trace: list[str] = []
        self.requests: list[Seen] = []
        self.lost = self.retractions = 0
        self.engine: Any = world.module("managers.scheduler")
        self.batching: Any = world.module("managers.schedule_batch")
        self.disaggregation: Any = world.module("disaggregation.decode")
        self._configure(overlap)
        memory = world.module("mem_cache.memory_pool")
        allocators = world.module("mem_cache.allocator.paged")
        allocators.alloc_extend_kernel, allocators.alloc_decode_kernel = Kernel(_fill), Kernel(_fill_one)
        world.module("mem_cache.allocation").assign_req_to_token_pool = Kernel(_assign)
        size = pages * PAGE
        self.target, self.draft = (
            memory.MLATokenToKVPool(size, PAGE, torch.float32, 3, 1, 1, "cpu", False) for _ in "td"
        )
        self.allocator = allocators.PagedTokenToKVPoolAllocator(size, PAGE, torch.float32, "cpu", self.target, True)
        self.slots = self.disaggregation.DecodeReqToTokenPool(slots, 256, "cpu", False, slots)
        self.scheduler = self._scheduler(overlap)
        self.free_slots, self.free_pages = set(self.slots.free_slots), pages
        self._arriving: deque[Seen] = deque()

    def _configure(self, overlap: bool) -> None:
        self.arguments = Settings(
            disaggregation_mode="decode",
            page_size=PAGE,
            speculative_algorithm="EAGLE" if self.speculative else None,
            speculative_num_steps=3,
            speculative_eagle_topk=1,
            max_speculative_num_draft_tokens=DRAFTED,
            speculative_num_draft_tokens=DRAFTED,
            disable_radix_cache=True,
            disable_overlap_schedule=not overlap,
            dllm_algorithm=None,
            dcp_size=1,
            retraction_policy="length",
            enable_mamba_extra_buffer=lambda: False,
            enable_mamba_extra_buffer_lazy=lambda: False,
        )
        context: Any = self.world.module("runtime_context").get_context()
        context._server_args = self.arguments
        context.parallel._overrides["dcp_enabled"] = False
        kernel = Settings(attention_backend="torch_native")
        names = ("exec", "schedule", "memory", "spec", "disagg", "serving", "observability", "mm", "lora")
        context._config_bags = {name: Settings(kernel=kernel) for name in names}
        context._config_bags["spec"] = self.arguments
        context._config_bags["disagg"].disaggregation_decode_polling_interval = 1

    def _scheduler(self, overlap: bool) -> Any:
        algorithm = self.world.module("speculative.spec_info").SpeculativeAlgorithm
        relays = self.world.module("managers.overlap_utils")
        relays.gather_spec_extras = _gather
        cache = self.world.module("mem_cache.chunk_cache").ChunkCache
        processor = self.world.module("managers.scheduler_components.batch_result_processor")
        mode = self.world.module("disaggregation.utils").DisaggregationMode.DECODE
        one: Any = object.__new__(self.engine.Scheduler)
        vars(one).update(
            server_args=self.arguments,
            disaggregation_mode=mode,
            spec_algorithm=algorithm.from_string(self.arguments.speculative_algorithm),
            enable_overlap=overlap,
            enable_hisparse=False,
            enable_decode_hicache=False,
            enable_pdmux=False,
            enable_unified_memory=False,
            enable_fpm=False,
            enable_priority_scheduling=False,
            abort_on_priority_when_disabled=False,
            require_mlp_sync=False,
            is_generation=True,
            hisparse_coordinator=None,
            scripted_scheduler_hook=None,
            forward_sleep_time=None,
            enable_dp_attention=False,
            ps=Settings(pp_size=1),
            model_config=Settings(vocab_size=1000, think_end_ids=None, context_len=256),
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.slots,
            max_running_requests=self.slots.size,
            waiting_queue=[],
            forward_ct=0,
            last_batch=None,
            chunked_req=None,
            result_queue=deque(),
            batch_record_buf=[None, None],
            batch_record_ct=0,
            _engine_paused=False,
            polling_count=0,
            polling_interval=1,
            _war_barrier_enabled=False,
            _confidence_budget_prepare=None,
            device="cpu",
            device_module=torch.cpu,
            forward_stream=Ignored(),
            schedule_stream=Ignored(),
            copy_stream=Ignored(),
            forward_stream_ctx=nullcontext(),
            copy_stream_ctx=nullcontext(),
            grammar_manager=Settings(has_waiting_grammars=lambda: False, abort_requests=lambda message: None),
            dllm_config=None,
            enable_hicache_storage=False,
            metrics_reporter=self._reporter(),
            ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, chunked_req=None: batch),
            dp_attn_adapter=SimpleNamespace(maybe_prepare_mlp_sync_batch=lambda batch: batch),
            ipc_channels=SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=self._told)),
            profiler_manager=Ignored(),
            request_receiver=SimpleNamespace(recv_requests=lambda: []),
            model_worker=SimpleNamespace(
                forward_batch_generation=self._forward, on_verify_complete_cpu=lambda *args, **kwargs: None
            ),
            draft_worker=SimpleNamespace(draft_worker=object.__new__(self._draft_class()))
            if self.speculative
            else None,
            process_input_requests=self._begin,
            publish_load_snapshot=lambda **kwargs: None,
            maybe_send_health_check_signal=lambda: None,
            _record_step_counters=lambda *args: None,
            _maybe_clear_mm_inputs=lambda batch: None,
            _maybe_report_active_ranks=lambda: None,
            set_schedule_time_batch=lambda batch: None,
            on_idle=lambda: self.trace.append("idle"),
        )
        one.running_batch = self.batching.ScheduleBatch(reqs=[])
        one.new_token_ratio_tracker = SimpleNamespace(current=0.5, decay_step=lambda: None)
        self.world.module(
            "managers.schedule_batch"
        ).NewTokenRatioTracker.estimate_new_token_ratio_after_retract = staticmethod(lambda requests: 0.5)
        one.tree_cache = cache(
            SimpleNamespace(req_to_token_pool=self.slots, token_to_kv_pool_allocator=self.allocator, page_size=PAGE)
        )
        one.future_map = relays.FutureMap("cpu", one.spec_algorithm, self.slots)
        fields = processor.SchedulerBatchResultProcessor.__dataclass_fields__
        values = {name: Ignored() for name in fields} | {
            "is_generation": True,
            "disaggregation_mode": mode,
            "enable_overlap": overlap,
            "enable_overlap_mlx": False,
            "server_args": self.arguments,
            "model_config": one.model_config,
            "token_to_kv_pool_allocator": self.allocator,
            "tree_cache": one.tree_cache,
            "req_to_token_pool": self.slots,
            "metrics_reporter": one.metrics_reporter,
            "model_worker": one.model_worker,
            "draft_worker": one.draft_worker,
        }
        one.batch_result_processor = processor.SchedulerBatchResultProcessor(**values)
        stock = one.process_batch_result

        def process(batch: Any, result: Any) -> None:
            if batch.forward_mode.is_decode():
                self.trace.append(f"result {batch.forward_iter}")
                for place, request in enumerate(batch.reqs):
                    if request.is_retracted:
                        self.lost += 1 if result.accept_lens is None else int(result.accept_lens[place])
            stock(batch, result)

        run = one.run_batch

        def run_batch(batch: Any) -> Any:
            self.trace.append(f"run {one.forward_ct + 1}")
            return run(batch)

        one.process_batch_result, one.run_batch = process, run_batch
        queue: Any = object.__new__(self.disaggregation.DecodePreallocQueue)
        arrivals = SimpleNamespace(queue=[], extend=lambda requests: None, pop_transferred=self._arrive)
        vars(queue).update(
            scheduler=one,
            req_to_token_pool=self.slots,
            token_to_kv_pool_allocator=self.allocator,
            token_to_kv_pool=self.target,
            draft_token_to_kv_pool=self.draft if self.speculative else None,
            tree_cache=one.tree_cache,
            transfer_queue=arrivals,
            queue=[],
            retracted_queue=[],
            pending_reqs=[],
            max_total_num_tokens=self.allocator.size,
            num_reserved_decode_tokens=2 * DRAFTED,
            pop_preallocated=lambda: ([], []),
        )
        one.disagg_decode_prealloc_queue, one.disagg_decode_transfer_queue = queue, arrivals
        self.queue = queue
        for name in ("settle", "retract_draft"):
            if (self.world.root / f"sglang/srt/research/{name}.py").is_file():
                module = self.world.module(f"research.{name}")
                if module.ON and (self.speculative or name == "settle"):
                    module.admit(*((one, self.draft) if name == "retract_draft" else (one,)))
        return one

    def _draft_class(self) -> Any:
        return self.world.module("speculative.eagle_worker_v2").EagleDraftWorker

    @staticmethod
    def _reporter() -> Any:
        methods = ("update_spec_metrics", "report_decode_stats", "log_batch_result_stats", "update_device_timer")
        silent = {method: lambda *args, **kwargs: None for method in methods}
        return Settings(metrics_collector=Ignored(), num_generated_tokens=0, forward_ct_decode=0, **silent)

    # Requests

    def request(self, prompt: Sequence[int], new: int) -> Seen:
        """Let a request arrive; the prefill's KV comes with it as soon as there is room."""
        parameters = Settings(
            max_new_tokens=new,
            stop_strs=[],
            stop_regex_strs=[],
            ignore_eos=True,
            custom_params=None,
            logit_bias=None,
            sampling_seed=None,
            top_k=1,
        )
        made = self.batching.Req(f"r{len(self.requests)}", "", array("q", prompt), parameters, vocab_size=1000)
        made.time_stats = Ignored()
        seen = Seen(made, list(prompt), new)
        self.requests.append(seen)
        self._arriving.append(seen)
        return seen

    def _arrive(self) -> list[Any]:
        came: list[Any] = []
        while self._arriving and self.slots.available_size():
            seen = self._arriving[0]
            needed, _ = self.queue._prealloc_required_tokens(seen.request)
            # The budget does not know those that came just now: they are in no queue yet.
            if needed > self.queue._allocatable_token_budgets(extra_reserved_reqs=len(came)):
                break
            self._arriving.popleft()
            came.append(self._transfer(seen))
        return came

    def _transfer(self, seen: Seen) -> Any:
        request, prompt = seen.request, seen.prompt
        self.queue._pre_alloc(request)
        slots = self.slots.req_to_token[request.req_pool_idx, : len(prompt)].long()
        rows = [row(token, place) for place, token in enumerate(prompt)]
        first = following(rows)
        self.target.kv_buffer[0][slots] = torch.tensor(rows).view(-1, 1, 1)
        self.draft.kv_buffer[0][slots] = self._draft_rows([*prompt, first], 0).view(-1, 1, 1)
        request.output_ids.append(first)
        if self.speculative:
            request.output_topk_p = torch.ones(1)
            request.output_topk_index = torch.tensor([first])
            request.hidden_states_tensor = torch.tensor([float(len(prompt))])
            request.output_dsa_topk_indices = torch.tensor([len(prompt)], dtype=torch.int32) if self.seeds else None
        return request

    def abort(self, seen: Seen) -> None:
        """Abort it through the engine's own handler, wherever it is."""
        seen.aborted = True
        if seen in self._arriving:
            self._arriving.remove(seen)
            return
        self.scheduler.abort_request(SimpleNamespace(rid=seen.request.rid, abort_all=False, abort_message=None))

    def _told(self, message: Any, request: Any) -> None:
        """The answer to an abort of a retracted request, or of the last one that does not fit."""
        request.finished_reason = request.finished_reason or "told"

    # The model

    @staticmethod
    def _draft_rows(tokens: Sequence[int], start: int) -> torch.Tensor:
        """Draft rows for all but the last of ``tokens``, the first of which stands at ``start``."""
        return torch.tensor([row(token, start + place) + 0.5 for place, token in enumerate(tokens[1:])])

    def _forward(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None = None, **kwargs: Any) -> Any:
        return self._verify(batch, on_publish) if self.speculative else self._decode(batch)

    def _decode(self, batch: Any) -> Any:
        result = self.world.module("managers.utils").GenerationBatchResult
        tokens = []
        for place, index in enumerate(batch.req_pool_indices.tolist()):
            length = int(batch.seq_lens[place])
            slots = self.slots.req_to_token[index, :length].long()
            assert int(slots[-1]) == int(batch.out_cache_loc[place])
            self.target.kv_buffer[0][slots[-1]] = row(int(batch.input_ids[place]), length - 1)
            tokens.append(following(self.target.kv_buffer[0][slots, 0, 0].tolist()))
        return result(next_token_ids=torch.tensor(tokens), logits_output=None)

    def _verify(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> Any:
        result = self.world.module("managers.utils").GenerationBatchResult
        relayed = batch.spec_info
        accepted, tokens, bonus = [], [], []
        by_index = {seen.request.req_pool_idx: seen for seen in self.requests}
        for place, index in enumerate(batch.req_pool_indices.tolist()):
            length = int(batch.seq_lens[place])
            slots = self.slots.req_to_token[index, : length + DRAFTED].long()
            target, draft = self.target.kv_buffer[0], self.draft.kv_buffer[0]
            rows = target[slots[:length], 0, 0].tolist()
            token = int(relayed.bonus_tokens[place])
            history = [*(int(value) // STEP for value in rows), token]
            good = torch.equal(draft[slots[:length], 0, 0], self._draft_rows(history, 0))
            good &= float(relayed.hidden_states[place]) == length and int(relayed.topk_index[place]) == token
            run, took = [token], DRAFTED if good else 1
            for step in range(took):
                rows.append(row(run[-1], length + step))
                run.append(following(rows))
            target[slots[length:]] = NOISE
            draft[slots[length:]] = NOISE
            target[slots[length : length + took]] = torch.tensor(rows[length:]).view(-1, 1, 1)
            draft[slots[length : length + took]] = self._draft_rows(run, length).view(-1, 1, 1)
            accepted.append(took)
            tokens += run[1:] + [0] * (DRAFTED - took)
            bonus.append(run[-1])
            seen = by_index[index]
            seen.steps += 1
            seen.poor += not good
        lengths = batch.seq_lens + torch.tensor(accepted)
        if on_publish:
            on_publish(lengths)
        following_input = self.world.module("speculative.eagle_info").EagleDraftInput(
            topk_p=torch.ones(len(bonus), 1),
            topk_index=torch.tensor(bonus).view(-1, 1),
            hidden_states=lengths.float().view(-1, 1),
            bonus_tokens=torch.tensor(bonus),
            dsa_topk_indices=lengths.int().view(-1, 1) if self.relays_seeds else None,
        )
        return result(
            next_token_ids=torch.tensor(tokens),
            accept_lens=torch.tensor(accepted),
            new_seq_lens=lengths,
            next_draft_input=following_input,
            speculative_num_draft_tokens=DRAFTED,
            logits_output=None,
        )

    # The loop

    def run(self, plan: Iterator[Callable[[Node], None]], limit: int = 4000) -> None:
        """Run the engine's own event loop; before each round the next entry of ``plan`` is called, until it ends.

        Raises:
            AssertionError: the loop went round ``limit`` times.
        """
        self._plan, self._rounds, self._limit = plan, 0, limit
        loop = (
            "event_loop_overlap_disagg_decode" if self.scheduler.enable_overlap else "event_loop_normal_disagg_decode"
        )
        with self._watched(), suppress(Done):
            getattr(self.scheduler, loop)()

    def _begin(self, received: Any) -> None:
        self._rounds += 1
        assert self._rounds < self._limit, f"no end: {self.trace[-12:]}"
        self.engine.TEST_RETRACT = False
        action = next(self._plan, None)
        if action is None:
            raise Done
        action(self)
        self.check()

    def retract(self) -> None:
        """Have the engine retract in this round, by its own switch."""
        self.engine.TEST_RETRACT, self.engine.TEST_RETRACT_INTERVAL = True, 1

    @property
    def busy(self) -> bool:
        """Whether anything is left to be done."""
        one = self.scheduler
        return bool(
            self._arriving
            or one.waiting_queue
            or self.queue.retracted_queue
            or not one.running_batch.is_empty()
            or one.result_queue
        )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        offload = self.batching.Req.offload_kv_cache

        def watched(request: Any, *args: Any) -> None:
            self.retractions += 1
            self.trace.append(f"offload {request.rid}")
            seen = next(seen for seen in self.requests if seen.request is request)
            seen.rows_behind.append(request.kv_committed_len - (request.seqlen - 1))
            offload(request, *args)

        with (
            mock.patch.object(self.batching.Req, "offload_kv_cache", watched),
            mock.patch.object(torch.Tensor, "record_stream"),
        ):
            yield

    def check(self) -> None:
        """No slot is owned twice, none is lost."""
        free = torch.cat([self.allocator.free_pages, self.allocator.release_pages]).tolist()
        assert len(free) == len(set(free)), "a page is free twice"
        owned: list[int] = []
        held = {seen.request for seen in self.requests if seen.request.kv is not None}
        for request in held:
            slots = self.slots.req_to_token[request.req_pool_idx, : request.kv.kv_allocated_len]
            pages = (slots // PAGE).unique().tolist()
            owned += pages
            assert 0 not in pages
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert not set(owned) & set(free), "a page is free and owned"
        assert len(owned) + len(free) == self.free_pages, "a page is lost"
        rows = [request.req_pool_idx for request in held]
        assert len(rows) == len(set(rows)) and not set(rows) & set(self.slots.free_slots)
        assert set(rows) | set(self.slots.free_slots) == self.free_slots


def drain(node: Node, also: Callable[[Node], None] | None = None) -> Iterator[Callable[[Node], None]]:
    """A plan that goes on, doing ``also`` in each round, until nothing is left to do."""
    while node.busy:
        yield also or (lambda _: None)
