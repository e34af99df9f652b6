"""`tierkv gateway`: one OpenAI-compatible address in front of prefill and decode nodes."""
