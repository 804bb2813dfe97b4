from tests.support.triton_interpreter import bfloat16_in_the_interpreter  # noqa: F401
