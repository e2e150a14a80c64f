"""What `aio-kv bench` measures. One module per contender or question; `disk` puts them together."""
