"""Policy: chooses tiles and swaps for a traced step and a budget.

Every decision on segments, numbers of tiles, checkpoints and swaps is made here; `rewriters` executes the plans.
Searches, their estimates and the texts of `BudgetError` belong here, passes over graphs do not.
Imports `tflms_sft._report` and the packages below it.
"""
