"""A mark for tests of products in FP8, which older versions of torch compute on GPUs alone."""

import pytest
import torch


def _has_products_by_row() -> bool:
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scales = torch.ones(16, 1)
    try:
        torch._scaled_mm(
            ones, ones.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError:
        return False
    return True


needs_fp8_products = pytest.mark.skipif(
    not _has_products_by_row(),
    reason=f"torch {torch.__version__} multiplies FP8 by row on GPUs alone; 2.15 on a CPU too",
)
