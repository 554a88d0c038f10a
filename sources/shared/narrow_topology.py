"""The one pair of topologies, beside prefill CP 1, between which KV may go to a decode engine with DCP.

Prefill: four CP ranks of two attention TP ranks, the whole KV on each CP rank, CP rank 0 alone sends. Decode: two DCP
ranks of one attention TP group of two. Both engines read the same gate; a prefill that passed its own checks, and that
will compare what a decode engine registers with what it holds, says so in a header of its bootstrap reply, because a
decode engine cannot see the prefill's environment: one that sent from all CP ranks would leave three quarters of the
rows unwritten without an error, one with another draft those of a layer. (A header, since an engine without this patch
refuses a reply with an unknown field.)
"""

from __future__ import annotations

from sglang.srt.research import gates

GATE = "SGLANG_RESEARCH_PCP4_DCP2"
ENABLED: bool = gates.enabled(GATE)

PREFILL_CP_SIZE = 4
ATTN_TP_SIZE = 2
DECODE_DCP_SIZE = 2

MARK = "X-Research-PCP4-DCP2"
"""Header of a bootstrap reply; its value is ``MARKED``."""

# Prefills of bundle 0.1.0 say "1": they pass their own checks, and compare neither layers nor index.
MARKED = "2"
