// This is a module of its own, so that it is none of the main one; what it is built with is in v*.mod.
module github.com/talos-ccm/talos-ccm/packaging/image/talos

go 1.26.1
