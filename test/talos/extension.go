package talos

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
)

// extensionImage is what Talos's imager calls the file system of the first extension. The name is that of its
// ExtensionStatus, too.
const extensionImage = "0.sqsh"

// extensionLayers lays out what an extension adds to a root file system, as Talos's imager and init do: the extension's
// own files, and the list of what is installed. That list becomes a folder in dir. The layers are returned topmost
// first.
func extensionLayers(extension, dir string) ([]string, error) {
	extension, err := checkLayer(extension)
	if err != nil {
		return nil, err
	}

	loaded, err := extensions.Load(extension)
	if err != nil {
		return nil, fmt.Errorf("load extension %s: %w", extension, err)
	}

	list, err := os.MkdirTemp(dir, "extensions-")
	if err != nil {
		return nil, fmt.Errorf("make folder for list of extensions: %w", err)
	}

	// It is the machine's root folder as well.
	if err := os.Chmod(list, 0o755); err != nil {
		return nil, fmt.Errorf("open up folder for list of extensions: %w", err)
	}

	file := filepath.Join(list, constants.ExtensionsRuntimeConfigFile)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return nil, fmt.Errorf("make folder for list of extensions: %w", err)
	}

	installed := extensions.Config{Layers: []*extensions.Layer{{Image: extensionImage, Metadata: loaded.Manifest.Metadata}}}
	if err := installed.Write(file); err != nil {
		return nil, fmt.Errorf("write list of extensions: %w", err)
	}

	return []string{list, loaded.RootfsPath()}, nil
}

// checkLayer refuses folders that cannot be named in the options of an overlay mount.
func checkLayer(dir string) (string, error) {
	absolute, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("find extension: %w", err)
	}

	if strings.ContainsAny(absolute, ":,\\") {
		return "", fmt.Errorf("lay extension %s over the root file system: its path has a character that overlay mounts reserve", absolute)
	}

	if info, err := os.Stat(absolute); err != nil || !info.IsDir() {
		return "", fmt.Errorf("lay extension %s over the root file system: it is no folder", absolute)
	}

	return absolute, nil
}
