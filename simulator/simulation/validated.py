"""Measured over predicted step of published settings, by kind of run. Written by
`python benchmarks/validate.py --write-intervals simulator/simulation/validated.py`; not edited by hand.

Near-duplicates (one source, model and cut of it) are one setting, with the middle of their ratios.
"""

from __future__ import annotations

RATIOS: tuple[tuple[tuple[str, str, bool, bool], tuple[float, ...]], ...] = (
    (
        ("deepspeed-zero3", "dgx-a100-80g", False, False),
        (1.1224,),
    ),
    (
        ("fsdp", "dgx-a100-80g", False, False),
        (
            0.9364,
            0.9471,
            0.9624,
            0.9785,
            0.9806,
            0.9901,
            0.9938,
        ),
    ),
    (
        ("fsdp", "dgx-h100", False, False),
        (
            0.9934,
            1.0053,
            1.0112,
            1.0168,
            1.0338,
            1.0374,
            1.0820,
        ),
    ),
    (
        ("fsdp", "dgx-h100", True, False),
        (1.0072,),
    ),
    (
        ("fsdp-1.13", "dgx-a100-40g", False, False),
        (
            0.9830,
            1.0064,
            1.0182,
            1.0265,
            1.0908,
            1.2016,
        ),
    ),
    (
        ("fsdp-1.13", "dgx-a100-80g", False, False),
        (1.0110,),
    ),
    (
        ("megatron-2021", "dgx-2", False, False),
        (
            0.9293,
            0.9524,
            0.9595,
            0.9762,
        ),
    ),
    (
        ("megatron-2021", "dgx-a100-40g", False, False),
        (
            0.9785,
            0.9831,
            1.0102,
            1.0140,
        ),
    ),
    (
        ("megatron-2021", "dgx-a100-80g", False, False),
        (
            0.9604,
            0.9796,
            0.9856,
            1.0034,
            1.0073,
            1.0097,
            1.0134,
            1.0162,
            1.0481,
        ),
    ),
    (
        ("megatron-2022", "dgx-a100-80g", False, False),
        (
            0.9877,
            0.9925,
            0.9953,
        ),
    ),
    (
        ("megatron-2023", "dgx-a100-80g", False, False),
        (0.9924,),
    ),
    (
        ("megatron-deepspeed", "alps-gh200", False, False),
        (
            1.1459,
            1.3300,
            1.4803,
        ),
    ),
    (
        ("megatron-deepspeed", "dgx-a100-80g", False, False),
        (
            0.8816,
            0.9242,
            0.9434,
            0.9512,
            0.9562,
            0.9760,
            0.9760,
            0.9921,
            0.9929,
            0.9931,
            0.9969,
            0.9989,
            1.0019,
            1.0043,
            1.0067,
            1.0092,
            1.0192,
            1.0401,
            1.0476,
            1.0502,
            1.0557,
            1.0613,
            1.0629,
            1.0786,
            1.0813,
            1.1016,
        ),
    ),
    (
        ("megatron-deepspeed-2023", "dgx-a100-80g", False, False),
        (
            0.9581,
            0.9634,
            0.9678,
            0.9814,
            0.9845,
            0.9953,
            1.0013,
            1.0090,
            1.0140,
            1.0313,
            1.0668,
            1.0962,
            1.1433,
            1.1713,
            1.2469,
            1.6111,
        ),
    ),
    (
        ("megatron-fsdp", "dgx-h100", False, True),
        (
            1.0194,
            1.0402,
            1.0473,
            1.0590,
        ),
    ),
    (
        ("megatron-te", "dgx-a100-80g", False, False),
        (0.9934,),
    ),
    (
        ("megatron-te", "dgx-b200", False, False),
        (
            0.9431,
            0.9495,
            1.0052,
            1.0118,
            1.0195,
            1.0202,
            1.0205,
            1.0538,
        ),
    ),
    (
        ("megatron-te", "dgx-b200", False, True),
        (
            0.9818,
            1.0423,
        ),
    ),
    (
        ("megatron-te", "dgx-b200", True, False),
        (
            0.9591,
            0.9775,
        ),
    ),
    (
        ("megatron-te", "dgx-b200", True, True),
        (
            0.9903,
            0.9927,
            1.0881,
            1.2262,
            1.2758,
            1.2985,
        ),
    ),
    (
        ("megatron-te", "dgx-b300", True, True),
        (
            0.9968,
            1.0139,
            1.0262,
        ),
    ),
    (
        ("megatron-te", "dgx-h100", False, False),
        (
            1.0031,
            1.0076,
            1.0089,
            1.0117,
            1.1504,
        ),
    ),
    (
        ("megatron-te", "dgx-h100", False, True),
        (
            1.0018,
            1.0183,
            1.0288,
            1.0319,
            1.0340,
            1.0344,
            1.0346,
            1.0366,
            1.0478,
            1.0551,
            1.0646,
            1.1295,
        ),
    ),
    (
        ("megatron-te", "dgx-h100", True, False),
        (
            0.9411,
            0.9558,
            0.9626,
            0.9642,
            0.9769,
            0.9817,
            0.9955,
            0.9984,
            1.0094,
            1.0096,
            1.0191,
            1.0208,
            1.0254,
            1.0321,
            1.0504,
            1.1249,
        ),
    ),
    (
        ("megatron-te", "dgx-h100", True, True),
        (
            1.1185,
            1.1190,
            1.1190,
            1.1254,
            1.1286,
            1.1463,
            1.1546,
            1.1781,
            1.2620,
            1.2631,
            1.6790,
            3.0968,
        ),
    ),
    (
        ("megatron-te", "dgx-h200", True, False),
        (1.0190,),
    ),
    (
        ("megatron-te", "gb200-nvl72", False, True),
        (0.8832,),
    ),
    (
        ("megatron-te", "gb200-nvl72", True, False),
        (
            0.8755,
            0.9783,
            0.9868,
            0.9877,
            0.9916,
            0.9980,
        ),
    ),
    (
        ("megatron-te", "gb200-nvl72", True, True),
        (
            0.8974,
            0.9212,
            1.0567,
            1.1628,
            1.2186,
        ),
    ),
    (
        ("megatron-te", "gb300-nvl72", False, True),
        (0.8850,),
    ),
    (
        ("megatron-te", "gb300-nvl72", True, False),
        (
            0.8254,
            0.9898,
            1.0199,
            1.0561,
            1.0863,
            1.1482,
        ),
    ),
    (
        ("megatron-te", "gb300-nvl72", True, True),
        (
            0.9145,
            1.0186,
            1.0980,
        ),
    ),
    (
        ("nemo-24.05", "dgx-h100", False, False),
        (
            0.8728,
            0.9220,
            0.9900,
            1.0079,
            1.0099,
            1.0228,
            1.0459,
            1.1180,
        ),
    ),
    (
        ("nemo-24.05", "dgx-h100", True, False),
        (
            0.9485,
            1.0038,
            1.0218,
            1.0319,
            1.0681,
            1.0823,
            1.1112,
            1.1439,
        ),
    ),
    (
        ("nemo-25.02", "dgx-h100", False, False),
        (
            0.9547,
            0.9548,
            1.0017,
        ),
    ),
    (
        ("nemo-25.02", "dgx-h100", True, False),
        (
            0.9474,
            0.9792,
            1.0041,
        ),
    ),
    (
        ("nemo-25.02", "gb200-nvl72", False, False),
        (0.9996,),
    ),
    (
        ("nemo-25.02", "gb200-nvl72", False, True),
        (
            0.8772,
            1.8665,
            1.8931,
        ),
    ),
    (
        ("nemo-25.02", "gb200-nvl72", True, False),
        (1.0758,),
    ),
    (
        ("nemo-25.02", "gb200-nvl72", True, True),
        (0.9558,),
    ),
    (
        ("torchtitan", "dgx-a100-80g", False, False),
        (
            0.9571,
            0.9894,
            1.0174,
            1.0234,
        ),
    ),
    (
        ("torchtitan", "dgx-b200", False, False),
        (1.2910,),
    ),
    (
        ("torchtitan", "dgx-b200", True, False),
        (1.6759,),
    ),
    (
        ("torchtitan", "dgx-h100", False, False),
        (
            0.9929,
            1.0028,
            1.0086,
        ),
    ),
    (
        ("torchtitan", "dgx-h100", True, False),
        (
            1.0105,
            1.0144,
            1.0278,
            1.0419,
        ),
    ),
    (
        ("xla", "dgx-h100", False, False),
        (1.0278,),
    ),
    (
        ("xla", "dgx-h100", True, False),
        (
            0.9394,
            1.2477,
        ),
    ),
    (
        ("zero-bubble", "dgx-a100-80g", False, False),
        (
            0.9499,
            0.9736,
            1.0054,
            1.0090,
            1.0110,
            1.0180,
            1.0405,
        ),
    ),
    (
        ("zero-bubble-flash", "dgx-a100-80g", False, False),
        (
            0.9908,
            1.0121,
        ),
    ),
    (
        ("zero-bubble-te", "dgx-a100-80g", False, False),
        (
            1.0009,
            1.0072,
        ),
    ),
)
