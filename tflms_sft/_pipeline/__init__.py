"""From a step and `PipelineParams` to a pipeline and its report: devices, cuts, checks of micro-batches.

The only entrance to `rewriters.batch_semantics`. Imports `tflms_sft._planner` and the packages below it.
"""
