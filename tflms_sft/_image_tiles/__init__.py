"""Parts of images as samples of their own, for data parallelism.

Imports `tflms_sft._util` and `rewriters`.
"""

from tflms_sft._util.requirements import check_backend, check_versions

check_versions()  # A program may import this package without a name of `tflms_sft`.
check_backend()
