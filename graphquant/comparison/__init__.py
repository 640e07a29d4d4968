"""Two models on the same data: how far their outputs are apart, and what each quantized tensor adds to that."""

from graphquant.comparison.run import compare
from graphquant.comparison.sites import Sites, prepared_beside, sites_of
from graphquant.comparison.types import Comparison, OutputFigures, SiteFigures

__all__ = ["Comparison", "OutputFigures", "SiteFigures", "Sites", "compare", "prepared_beside", "sites_of"]
