"""Analysis of models and plans: comparison with the float model, differences, explanations, summaries and reports."""

from graphquant.analysis.compare import compare_runners
from graphquant.analysis.comparison import Comparison, OutputFigures, SiteFigures
from graphquant.analysis.diff import Differences, ModelChange, diff_models, diff_plans
from graphquant.analysis.explain import (
    NO_RULES,
    Explanation,
    ExplanationReport,
    explain_quantized,
    explain_uses,
    judge_explained_ops,
)
from graphquant.analysis.site_errors import ComparedSites, match_sites, prepare_like
