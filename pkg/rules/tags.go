package rules

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxTags limits the tags of a machine from which rules set labels. Root on a machine can report any number of tags.
const maxTags = 64

func (r *rule) compileTags(source *LabelsFromTags, path *field.Path) (errs field.ErrorList) {
	if source == nil {
		return nil
	}

	var err error
	if r.tags, err = regexp.Compile(source.Match); err != nil {
		errs = append(errs, invalid(path.Child("match"), err))
	}

	r.tagPrefix = source.Prefix
	if err := checkTagKey(r.tagPrefix + "name"); err != nil {
		errs = append(errs, invalid(path.Child("prefix"), err))
	}

	return errs
}

// checkTagKey returns why tags cannot set a label. Root on a machine must not gain a label by reporting tags that its
// kubelet may not set: the NodeRestriction admission plugin refuses most keys of these domains, and no others.
func checkTagKey(key string) error {
	domain, _, _ := strings.Cut("."+key, "/")
	if strings.HasSuffix(domain, ".kubernetes.io") || strings.HasSuffix(domain, ".k8s.io") {
		return fmt.Errorf("key %.80q cannot be set from tags: its domain is reserved by Kubernetes", key)
	}

	return checkKey(key)
}

// applyTags adds labels from the tags of the machine to the result, in the order of their names. Of tags with the same key,
// the first one sets the label.
func (r *rule) applyTags(result *Result) {
	sources := map[string]string{} // tags by the keys of their labels

	for _, tag := range slices.Sorted(maps.Keys(result.Platform.Tags)) {
		if result.tags > maxTags {
			return
		}

		if !r.tags.MatchString(tag) {
			continue
		}

		key, value := r.tagPrefix+r.tags.ReplaceAllString(tag, "$1"), result.Platform.Tags[tag]
		err := checkTagKey(key)
		other, isSet := sources[key]

		switch result.tags++; {
		case result.tags > maxTags:
			err = fmt.Errorf("rules set labels from at most %d tags of a machine, and ignore all further ones", maxTags)
		case err == nil && isSet:
			err = fmt.Errorf("tag %.80q sets the same label", other)
		case err == nil:
			err = labels.set(result, r, key, value)
		}

		if err == nil {
			sources[key] = tag
		} else {
			result.Problems = append(result.Problems, Problem{Rule: r.name, Key: fmt.Sprintf("labelsFromTags[%.80q]", tag), Value: value, Why: err.Error()})
		}
	}
}
