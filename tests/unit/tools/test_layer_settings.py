"""Settings of layers: each is a family's, and one that no family has is nobody's."""

from __future__ import annotations

from tools.layer_settings import layer_settings


def test_each_setting_of_layers_is_set_by_a_family() -> None:
    setters = layer_settings()
    assert not [name for name, families in setters.items() if not families]
    assert "wan" in setters["KeyRows.each"]  # of its named sizes with an image encoder
    assert {"flux", "sd3"} <= {*setters["Attend.joined"]}
    # Of a class that two parts are below it is one setting, and a family's own part has none here.
    assert "LayerPart.port" in setters and "Feed.port" not in setters
    assert not [name for name in setters if name.startswith(("FeedExperts", "OwnText"))]
