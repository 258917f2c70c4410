"""The networks: parts that all share, one folder for each family, and what is counted of any.

    family          what a family says of itself, and the registry of all families
    positions       the rules by which tokens have positions
    layers          the parts that networks are built of
    dit             the first family
    layer_costs     descriptions of layers: which linears and attention they have
    cost            parameters and operations of a network, from its description
    memory          memory of a device, from the description
    diffusers_names which tensors of Diffusers are which of ours: kinds of rows in a table

Networks are written for one device: nothing here asks for a rank.
"""
