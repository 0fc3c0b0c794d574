"""Plans as users see them: records, the summary, charts, the web page, TensorBoard.

A renderer takes a `PlanRecord` and makes no decisions. Imports `tflms_sft._trace` and the packages below it.
"""
