"""Turn segments into attention metadata, before the forward, for vLLM's backends and ours."""
