"""Numbers of the PowerNorm paper's Figures 2 to 7, decoded from their vector graphics.

The coordinates of the paths in the PDF of the ICML version were converted by the ticks of the axes. The program was not
kept: the numbers can be compared with the printed figures only.
"""

#: Medians of the paper's Figures 2 to 4, decoded from its vector graphics: panel -> label -> of each fifth.
PAPER_MEDIANS = {
    "mu_distance": {
        "paper, ResNet20 on CIFAR-10": (3.5e-7, 2.4e-7, 3.7e-7, 6.0e-7, 1.0e-6),
        "paper, BN on IWSLT14": (0.0096, 0.0159, 0.0145, 0.0134, 0.0130),
    },
    "sigma2_distance": {  # CIFAR-10's are exactly 0
        "paper, BN on IWSLT14": (0.0505, 0.735, 1.023, 1.349, 1.373),
    },
    "g_mu": {
        "paper, ResNet20 on CIFAR-10": (0.00127, 0.00118, 0.00085, 0.00056, 0.00045),
        "paper, BN on IWSLT14": (0.0084, 0.0086, 0.0067, 0.0074, 0.0076),
    },
    "g_sigma2": {
        "paper, ResNet20 on CIFAR-10": (0.0053, 0.0070, 0.0039, 0.0016, 0.0009),
        "paper, BN on IWSLT14": (0.0142, 0.0138, 0.0086, 0.0083, 0.0082),
    },
    "psi2_distance": {"paper, PN-V on IWSLT14": (0.0093, 0.0343, 0.103, 0.134, 0.196)},
    "g_psi2": {"paper, PN-V on IWSLT14": (0.00041, 0.00033, 0.00029, 0.00026, 0.00024)},
}

#: BLEU of the paper's Figure 5 by tokens of a mini-batch.
PAPER_BLEU = {
    "PN": {512: 35.64, 1024: 35.65, 2048: 35.72, 4096: 35.90},
    "LN": {512: 35.53, 1024: 35.30, 2048: 35.56, 4096: 35.50},
    "PN-V": {512: 34.94, 1024: 34.96, 2048: 35.06, 4096: 35.48},
    "BN": {512: 34.56, 1024: 34.71, 2048: 34.70, 4096: 34.95},
}

#: Indices of the singular values in PAPER_SPECTRA.
SPECTRA_INDICES = (0, 1, 2, 5, 10, 20, 50, 100, 200, 400, 600, 800, 900, 1000, 1022)
#: Singular values of the paper's Figure 6, divided by the largest, at SPECTRA_INDICES.
PAPER_SPECTRA = {
    "PN": (1, 0.618, 0.549, 0.453, 0.398, 0.354, 0.309, 0.280, 0.244, 0.196, 0.162, 0.123, 0.073, 0.033, 0.016),
    "LN": (1, 0.362, 0.297, 0.244, 0.202, 0.182, 0.159, 0.145, 0.125, 0.101, 0.084, 0.065, 0.051, 0.024, 0.009),
}

#: Medians of the paper's Figure 7, encoder layers 1 to 6.
PAPER_GAIN = (0.121, 0.090, 0.121, 0.124, 0.148, 0.172)
