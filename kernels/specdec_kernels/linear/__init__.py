"""Matrix products of a decoder layer, with the norm, gate and sum around them.

`reference` says what they compute, `cpu` has the public functions and their CPU path.
`products_triton` picks the kernel for a product: `one_row_triton`, `few_rows_triton` or the
library, for gates without a workspace (`cublas`); `tiles` has their launch configurations.
"""
