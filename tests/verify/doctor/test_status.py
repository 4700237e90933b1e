"""The page of what is known of the kernels: what did not hold and what was not found stand out."""

from __future__ import annotations

from shardproof.verify.doctor import status

FOUND = {"all_gather": {"interpreted": "ok", "PTX executed": "wrong: all_gather-w2", "assembled": "ok"}}


def test_a_floor_that_does_not_hold_and_a_mutant_that_nobody_finds_stand_out() -> None:
    wrong = [("spills", "a kernel's compilation", "assembled: 9 spills"), ("another", "the table", "")]
    page = status.page(FOUND, wrong, {"triton": "3.9.0"}, [], "2026-01-01")
    assert "| `all_gather` | yes | **no**: wrong: all_gather-w2 | yes | - | not yet |" in page
    assert "| spills | a kernel's compilation | assembled: 9 spills |" in page
    assert "| another | the table | **none** |" in page


def test_what_is_compiled_for_amd_and_the_code_that_is_carried_out_are_named() -> None:
    page = status.page(
        {"exact_product": {}}, [], {}, [], "2026-01-01", amd={"exact_product": "", "all_gather": "no code"}
    )
    assert "PTX executed for sm_80: `exact_product`. For sm_90 it multiplies by wgmma" in page
    assert "Triton makes code of `exact_product`" in page and "**Not** `all_gather`: no code." in page
    assert "MI300" not in status.page(FOUND, [], {}, [], "2026-01-01")


def test_other_versions_of_triton_are_a_table_of_their_own() -> None:
    others = {"3.6.0": {"a": {"interpreted": "ok", "assembled": "ok"}, "b": {"interpreted": "wrong"}}}
    page = status.page(FOUND, [], {"triton": "3.9.0"}, [], "2026-01-01", others)
    assert "| 3.6.0 | **not** b | - | all 1 | - |" in page
    assert "with Triton" not in status.page(FOUND, [], {}, [], "2026-01-01")
