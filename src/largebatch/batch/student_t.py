"""Student's distribution, for intervals from few numbers."""

# Quantiles of Student's distribution at 97.5 % for 1, 2, … degrees of freedom: NIST/SEMATECH e-Handbook of Statistical
# Methods, section 1.3.6.7.2. A table, because to load scipy takes longer than all else that `largebatch plan` does.
STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def student_t(degrees: int) -> float:
    """The quantile at 97.5 %, for intervals of 95 % confidence: that many standard errors on each side."""
    if degrees <= len(STUDENT_T):
        return STUDENT_T[degrees - 1]
    # The quantile of the normal distribution, and the first term of its expansion (Abramowitz and Stegun, 26.7.5).
    return 1.960 + 2.372 / degrees
