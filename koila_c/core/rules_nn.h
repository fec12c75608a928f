/* rules_nn.h - the words of the sections in ops_nn.def: layers, losses, attention, random draws. */
#ifndef KL_RULES_NN_H
#define KL_RULES_NN_H

#endif
