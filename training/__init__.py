"""Training of EAGLE and MTP heads and drafters of blocks for a target that is there.

`texts` reads conversations, has the target answer questions, and cuts their tokens into rows;
`heads` makes and saves a head; `unrolled` has what a head learns from, its loss, and what is
reported of it; and `session` is the whole, which can be stopped and resumed.
"""
