"""Plans as users see them: records, the summary, pictures, the page, TensorBoard.

A renderer takes a `PlanRecord` and decides nothing. Imports `tflms_sft._trace` and the packages below it.
"""
