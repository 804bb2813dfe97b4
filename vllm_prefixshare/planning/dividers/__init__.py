"""How KV segments are divided into work tiles; ``registry`` names the strategies."""
