"""Llava: one square an image, an MLP of two layers."""

from mmtrain.stock.stock_class import StockClass
from mmtrain.stock.stock_folder import Keys, StockFolder


class Llava(StockClass):
    """LLaVA 1.5 and its relatives."""

    name = "Llava"
    model_type = "llava"
    connectors = ("mlp2x_gelu",)
    fits = ("pad", "resize", "center_crop")

    def read(self, folder: StockFolder) -> Keys:
        return {"select_layer": folder.layer(-2, "default"), "image_fit": folder.fit()}
