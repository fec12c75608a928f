# SPDX-License-Identifier: Apache-2.0
"""Use koila in frameworks that write the training loop, or make the data loaders, themselves.

`koila.integrations.transformers` has a callback for the Trainer, `koila.integrations.lightning` one
for Lightning's. If you write the loop (Fabric, accelerate, Ignite, timm), call
`koila.lazy(loader)`, before or after the framework prepares the loader.
"""
