"""An open-loop load on any OpenAI-compatible endpoint, judged strictly: what was offered, what ended, who did it."""
