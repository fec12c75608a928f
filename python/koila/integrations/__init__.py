# SPDX-License-Identifier: Apache-2.0
"""koila inside frameworks that make their loops, or their data loaders, themselves.

`koila.integrations.transformers` has a callback for the Trainer, `koila.integrations.lightning` one
for Lightning's. Where the loop is yours (Fabric, accelerate, Ignite, timm), `koila.lazy(loader)` is
all it takes, before or after the framework prepares the loader.
"""
