"""Facts of models without torch: shapes, families, connectors, settings of a model's folder."""
