"""The engine's counters in Prometheus' text format. Names that vLLM has too are vLLM's."""

from __future__ import annotations

from rollout.policy.engine.core import Counters


def render_metrics(counters: Counters, paused: bool) -> str:
    rows = [
        ("vllm:num_requests_running", "gauge", "Requests in the batch.", counters.running),
        ("vllm:num_requests_waiting", "gauge", "Requests that wait for a place in the batch.", counters.waiting),
        ("vllm:prompt_tokens_total", "counter", "Prompt tokens, cached or not.", counters.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", "Tokens generated.", counters.generated_tokens),
        ("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found cached.", counters.cached_tokens),
        ("farmhand:prefilled_tokens_total", "counter", "Tokens run to fill the cache.", counters.prefilled_tokens),
        ("farmhand:steps_total", "counter", "Forward passes.", counters.steps),
        (
            "farmhand:busy_seconds_total",
            "counter",
            "Seconds in forward passes and sampling.",
            round(counters.busy_s, 6),
        ),
        ("farmhand:weight_updates_total", "counter", "Weight updates finished.", counters.weight_updates),
        ("farmhand:paused", "gauge", "1 while paused.", int(paused)),
    ]
    lines = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {value}" for name, kind, text, value in rows]
    return "\n".join(lines) + "\n"
