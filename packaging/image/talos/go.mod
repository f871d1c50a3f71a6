// A nested module, so that its requirements are not those of the main module. They are in v1.*.mod, one file per version
// of Talos.
module github.com/talos-ccm/talos-ccm/packaging/image/talos

go 1.26.1
