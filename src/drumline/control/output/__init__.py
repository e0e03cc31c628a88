"""What became of requests: commits forwards, ends requests, tells their clients.

`outputs` owns the live requests, `seats` knows which of them have which pool row. `steady` is
the batch that decodes as it did, `crossings` the aborts that miss their request on the wire,
`columns` how a round's outputs are laid out.
"""

from drumline.control.output.outputs import Outputs

__all__ = ["Outputs"]
