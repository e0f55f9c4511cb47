"""The `distinct` KV layout on a GPU: recorded decodes, fp32, full CUDA graphs and eager."""

import pytest
import recorded
import test_grid_goldens

DISTINCT = {"kv_cache_layout": "distinct"}
OURS = {"attention_backend": None}  # comes with the layout


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("d2f_llada", {}),
        ("d2f_dream", {}),
        ("d2f_dream", {"enforce_eager": True}),
        ("d2f_dream", {"block_size": 16}),
        ("d2f_dream", {"block_size": 256}),
    ],
    ids=str,
)
def test_d2f(name, options):
    recorded.check_d2f(name, DISTINCT, **OURS | options)


@pytest.mark.parametrize("model", test_grid_goldens.FILES)
def test_absolute_grid(model):
    recorded.check_blocks(model, DISTINCT, **OURS)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_keys_kept_after_the_span(family):
    """Piecewise graphs."""
    recorded.check_full(family, "dual_cache", DISTINCT, **OURS)
